"""Attention of requests that share the beginning of their prompt: shared keys are read once."""
