"""What a process knows and shows of itself as one of several that run a model together."""
