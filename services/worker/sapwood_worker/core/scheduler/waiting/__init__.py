"""Requests that wait, and their order of admission. Knows no batch and no page."""
