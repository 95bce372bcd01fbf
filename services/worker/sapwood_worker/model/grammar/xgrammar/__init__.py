"""The grammar backend over xgrammar, a pushdown automaton. Its library is imported when it is chosen: that takes seconds."""
