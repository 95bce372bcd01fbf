"""What clients speak: gRPC and several HTTP APIs, and who may. Knows requests and their flow, but no worker."""
