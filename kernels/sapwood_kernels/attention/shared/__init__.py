"""Attention of requests that share the beginning of their prompt: what they share is read once."""
