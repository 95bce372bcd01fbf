"""Verbs that measure a server: `bench` and `eval`."""
