"""How linear layers store and multiply their weights: a file a format, named in ``registry``. Knows no layer and no file."""
