"""Verbs that ask workers, one after the other: `worker` and `cache`."""
