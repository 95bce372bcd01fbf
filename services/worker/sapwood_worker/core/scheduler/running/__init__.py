"""Requests that run: their rows, their pages, their part of a step. Knows nothing of the order of admission."""
