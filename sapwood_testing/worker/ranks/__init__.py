"""Ranks that run a model together: as threads of one process, what they are asked, and as processes that hang."""
