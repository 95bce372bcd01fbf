"""Structured output: which tokens may come next, as masks. Only ``logit_masks`` imports torch."""
