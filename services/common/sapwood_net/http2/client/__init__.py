"""The client's end: one call on a connection of its own. Knows no server."""
