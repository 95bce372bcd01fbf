"""A request's way to a backend and back, as the text it came as. Knows no edge."""
