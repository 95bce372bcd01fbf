"""Pages of a prompt pass from the worker that computed it to the one that generates. Knows neither torch nor gRPC."""
