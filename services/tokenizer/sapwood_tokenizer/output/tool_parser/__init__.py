"""Finding tool calls in what a model writes: one family of formats a file, named in ``registry``."""
