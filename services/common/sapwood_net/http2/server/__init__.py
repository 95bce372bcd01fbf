"""The server's end: connections, streams, calls, and the handlers that answer them. Knows no client."""
