"""The workers: which there are, how they are, and the session with each. Knows neither clients nor queues."""
