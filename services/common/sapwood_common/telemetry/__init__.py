"""Logs, metrics and traces. Knows nothing of its callers."""
