"""The gRPC service: calls, streams, processes. The only room that knows protobuf."""
