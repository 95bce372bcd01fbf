"""OpenAI's Responses API: requests, answers, and those that are kept. Knows no gRPC and no worker."""
