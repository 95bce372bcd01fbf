"""The small layer library that models are built from. Knows no family, no file and no step."""
