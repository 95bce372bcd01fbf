"""How well texts fit each other or a label, in vLLM's shapes, by embeddings or a model's head. Knows no gRPC and no worker."""
