"""HTTP/2 and gRPC as bytes, for either end: frames, header blocks, messages, metadata. Knows no connection."""
