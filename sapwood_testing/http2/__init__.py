"""Connections without sockets, for tests of the HTTP/2 server."""
