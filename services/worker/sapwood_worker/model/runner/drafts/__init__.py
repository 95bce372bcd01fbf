"""Runners of draft models and heads, and what they draft."""
