"""The grammar backend over llguidance, an Earley parser with a lazily built lexer, bounded by fuel."""
