"""Communication between the worker's two processes: messages, sockets, start and end. Imports no gRPC, no torch and neither
process's code."""
