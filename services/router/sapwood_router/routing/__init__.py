"""Chooses a worker from plain views of all. Knows no gRPC, no connection and no request but its tokens."""
