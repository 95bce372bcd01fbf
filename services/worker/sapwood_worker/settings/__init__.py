"""Of a worker's settings: what names they take, and what they need to have an effect. Knows no part of the worker."""
