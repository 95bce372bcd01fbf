"""Where programs run: one file a backend."""
