"""How each family of models takes pictures."""
