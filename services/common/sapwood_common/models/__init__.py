"""Model files: where they lie, and the header of GGUF. Knows no tensor library."""
