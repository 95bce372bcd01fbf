"""Finding tool calls in what a model writes: families, named in ``registry``. Knows no grammar."""
