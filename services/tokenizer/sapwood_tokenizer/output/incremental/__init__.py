"""Parsing a text that arrives in pieces, so that the result does not depend on where it was cut."""
