"""Counters and budgets over time: rates, sliding counts, silences, turns."""
