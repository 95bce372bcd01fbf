"""Grammars of whole outputs: calls of tools in each family's own format, answers, and the reasoning before them.

What is written here is what the parsers of ``tool_parser`` and ``reasoning_parser`` read; a test holds each family to that.
"""
