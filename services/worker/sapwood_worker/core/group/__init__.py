"""Ranks that run a model together, in step: the leader, which the scheduler talks to, and its followers. Knows no model."""
