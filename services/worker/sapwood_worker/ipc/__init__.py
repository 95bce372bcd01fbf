"""Between the worker's two processes: messages, sockets, start and end. Neither gRPC nor torch; knows neither side."""
