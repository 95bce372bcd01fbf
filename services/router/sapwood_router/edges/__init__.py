"""The clients' APIs: gRPC, several HTTP APIs and a page for people, and the check who may use them. Knows requests and their
flow, no worker."""
