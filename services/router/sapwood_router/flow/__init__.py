"""A request's way from its edge to a worker and back, once over every other room. Knows no edge."""
