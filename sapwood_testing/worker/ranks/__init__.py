"""Ranks that run a model together, as threads of one process, and what they are asked."""
