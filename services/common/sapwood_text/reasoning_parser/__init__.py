"""Telling a model's reasoning from its answer: a family is a row of ``families``. Knows no tool call."""
