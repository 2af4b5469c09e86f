"""Pallas kernels for TPUs, of which each is loaded where it is chosen."""
