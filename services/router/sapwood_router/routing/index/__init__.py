"""Which worker holds which prefix: exactly, by guess, hot, or by hash. Plain data, which knows workers by name only."""
