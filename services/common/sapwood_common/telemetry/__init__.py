"""Logs, metrics and traces. Knows what is told to it and nothing of who tells it."""
