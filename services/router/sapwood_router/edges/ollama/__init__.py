"""Ollama's API: chats, texts, embeddings, models; answers are lines of JSON. Knows no gRPC and no worker."""
