"""Turns a step into a forward pass: inputs, graphs, sampling, answers. Knows no request beyond its rows."""
