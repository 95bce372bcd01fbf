"""Drafts of the running requests' next tokens: the drafters, and how many draft tokens are worth checking. Knows no pages."""
