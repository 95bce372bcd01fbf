"""Grammars of whole outputs: reasoning, then tool calls in a family's own format or an answer. Knows no written text."""
