"""gRPC over HTTP/2, listening, TLS and pacing for services on one event loop. Knows nothing of language models: see README.md."""
