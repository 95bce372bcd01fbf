"""Encoders: every token sees every other, nothing is cached; they give embeddings and labels."""
