"""What clients speak: gRPC and OpenAI's HTTP API, and who may. Knows requests and their flow, but no worker."""
