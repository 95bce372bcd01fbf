"""Structured output: which tokens may come next, and masks of that. Only ``logit_masks`` imports torch."""
