"""Runs the model on a step. Knows neither gRPC nor the scheduler: a step (``records.step``) in, tokens out."""
