"""gRPC over HTTP/2 on the event loop that answers the calls."""
