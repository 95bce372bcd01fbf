"""The API of text-embeddings-inference: vectors as bare lists. Its rerank is a shape of score's. Knows no gRPC and no worker."""
