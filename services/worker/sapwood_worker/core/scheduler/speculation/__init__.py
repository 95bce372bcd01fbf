"""Drafts of the running requests' next tokens: who guesses them, and how many are worth checking. Knows no page."""
