"""Kernels of layers that keep a state for each request: steps of one token a request, chunks of prompts, and the norm behind."""
