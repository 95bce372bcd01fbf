"""Requests that run: their rows, their pages, their part of a step. Knows nothing of whose turn is next."""
