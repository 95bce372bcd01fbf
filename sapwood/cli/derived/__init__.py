"""Models that are made of a model: in fewer bits, or to draft for it."""
