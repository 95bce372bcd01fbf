"""Telling a model's reasoning from its answer: one family a file, named in ``registry``."""
