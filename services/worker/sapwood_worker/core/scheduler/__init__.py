"""Continuous batching over integer page ids: no torch, no protobuf, no clock of its own."""
