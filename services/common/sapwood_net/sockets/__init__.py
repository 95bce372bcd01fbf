"""Listening, accepting and TLS. Knows no call and no message."""
