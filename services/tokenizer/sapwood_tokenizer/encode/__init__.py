"""Text to token ids: batches, caches, safe cuts. Knows no model's files and no gRPC."""
