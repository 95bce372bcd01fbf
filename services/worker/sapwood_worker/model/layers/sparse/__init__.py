"""Mixtures of experts in place of MLPs."""
