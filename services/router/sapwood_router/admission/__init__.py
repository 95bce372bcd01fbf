"""Requests wait here until a worker has room, in a fair order. Knows neither prompts nor how a worker is chosen."""
