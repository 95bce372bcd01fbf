"""Latent attention (MLA) but for attention itself: queries and values of few tokens, and how vectors come into their pages."""
