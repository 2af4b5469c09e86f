"""Decoder-only transformers as a parameter table plus pure functions."""
