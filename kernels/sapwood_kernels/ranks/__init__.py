"""Kernels of ranks that reach each other's memory."""
