"""What CPUs compute in C: the library, what compiles it and what calls it."""
