"""Grammars of whole outputs: tool calls in each family's own format, answers, and the reasoning before them."""
