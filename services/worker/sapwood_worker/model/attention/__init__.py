"""Attention over the paged KV cache, one backend a file. Knows pages and shapes, no model."""
