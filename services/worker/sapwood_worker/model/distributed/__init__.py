"""Ranks that compute a model together: groups, and what each has of a weight. Knows no layer."""
