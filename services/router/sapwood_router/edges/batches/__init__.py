"""OpenAI's batches: a file of requests, each answered once, however often routers and workers end meanwhile."""
