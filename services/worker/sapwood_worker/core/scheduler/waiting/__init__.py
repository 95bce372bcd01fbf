"""Requests that wait, and whose turn it is. Knows no batch and no page."""
