"""Tiles: of what sizes they are, by a model or as they were measured, and each expert's tokens sorted into them."""
