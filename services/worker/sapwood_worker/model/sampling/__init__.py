"""Choosing the next token from logits. Knows no model and no scheduler."""
