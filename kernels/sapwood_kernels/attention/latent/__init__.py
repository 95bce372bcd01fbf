"""Latent attention (MLA): all heads attend to one vector a token, expanded to keys and values or not."""
