"""Channels between services, the ranks' keyed way to each other, and the folder of their sockets."""
