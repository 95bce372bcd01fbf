"""Ranks that compute a model together: their groups, and each rank's part of a weight. Knows no layer."""
