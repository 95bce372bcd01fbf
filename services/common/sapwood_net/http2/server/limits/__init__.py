"""Limits for clients of an HTTP/2 server: counts and clocks. Knows no call and no handler."""
