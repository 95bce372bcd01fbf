"""Anthropic's API as requests and answers. Knows no gRPC and no worker."""
