"""The routes of vLLM's server besides OpenAI's API: tokens and versions. Knows no gRPC and no worker."""
