"""Cohere's API, version 2: chats and embeddings; its rerank is score's. Knows no gRPC and no worker."""
