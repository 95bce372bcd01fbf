"""gRPC over HTTP/2 on the event loop that answers the calls. Knows of Sapwood nothing but ``errors`` and ``pacing``."""
