"""Stages of a pipeline: what they give each other, and into what steps are cut for them."""
