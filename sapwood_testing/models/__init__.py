"""Stand-ins for places that models come from."""
