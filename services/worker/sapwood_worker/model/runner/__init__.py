"""Turns a step into a forward pass: inputs, graphs, sampling, outputs. Knows requests only as rows."""
