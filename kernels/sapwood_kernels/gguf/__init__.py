"""Products with matrices in GGUF's block formats, on a CPU: a library in C, what compiles it and what calls it."""
