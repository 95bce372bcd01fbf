"""Latent attention (MLA) without the attention itself: queries and values of few tokens, and storing vectors in pages."""
