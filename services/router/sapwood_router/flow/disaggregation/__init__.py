"""Whether one worker computes a request's prompt and another generates: what that costs here, and who would do it."""
