"""Calls by which trainers of other servers steer this one. Knows no gRPC and no worker."""
