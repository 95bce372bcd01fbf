"""What clients speak: gRPC, several HTTP APIs and a page for people, and who may. Knows requests and their flow, no worker."""
