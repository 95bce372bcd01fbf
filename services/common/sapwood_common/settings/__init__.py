"""A program's settings: flags, variables, YAML, and which go together. Knows no service."""
