"""The gRPC edge: the service, and messages to plain values and back. The only room that reads router.proto."""
