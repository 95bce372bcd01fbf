"""Families with mixtures of experts and grouped attention."""
