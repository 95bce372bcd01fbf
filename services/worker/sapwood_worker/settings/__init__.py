"""The names that a worker's settings take, and what they need to have an effect. Knows no part of the worker."""
