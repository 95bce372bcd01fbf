"""Sockets, channels and TLS. Knows no call and no message."""
