"""Heads that draft from a model's own hidden states: their checkpoints, their layers, and what the model keeps for them."""
