"""Pallas kernels for TPUs; a program loads a kernel when it chooses it."""
