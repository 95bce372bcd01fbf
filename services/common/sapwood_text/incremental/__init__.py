"""Parsing a text that arrives in pieces, with one result wherever it was cut. Knows no family and no tool."""
