"""Pictures: fetched, decoded and brought to the size that a model takes."""
