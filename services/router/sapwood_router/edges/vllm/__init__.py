"""What vLLM's server has beside OpenAI's API: tokens and versions. Knows no gRPC and no worker."""
