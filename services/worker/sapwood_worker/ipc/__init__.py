"""What passes between the worker's two processes: messages, sockets, start and end. Knows no gRPC, no torch, neither side."""
