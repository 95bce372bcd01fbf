"""How alike texts are, in vLLM's shapes: scores and rankings by a model's embeddings. Knows no gRPC and no worker."""
