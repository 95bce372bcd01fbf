"""The gRPC process: calls in, messages to the scheduler process out. No torch, nothing of core and model."""
