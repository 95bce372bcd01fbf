"""Who holds which prefix: exact, guessed, hot, or by hash. Plain data structures; know no worker but its name."""
