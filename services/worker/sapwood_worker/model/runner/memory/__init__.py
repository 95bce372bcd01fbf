"""How much memory a runner's pools get. Knows no step and no request."""
