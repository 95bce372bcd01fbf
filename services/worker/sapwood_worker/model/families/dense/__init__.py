"""Families without experts and with grouped attention."""
