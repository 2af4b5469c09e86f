"""Killable processes, which know nothing of rewards."""
