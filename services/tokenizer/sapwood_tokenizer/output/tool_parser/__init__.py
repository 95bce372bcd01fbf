"""Finding tool calls in what a model writes: one family a file, named in ``registry``. Knows no grammar."""
