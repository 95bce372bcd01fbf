"""Models' vision parts: what makes embeddings of pictures."""
