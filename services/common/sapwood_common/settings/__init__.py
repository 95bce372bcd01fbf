"""What a program can be told: flags, variables, YAML, and what makes sense together. Knows no service."""
