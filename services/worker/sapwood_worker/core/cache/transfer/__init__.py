"""KV transfers: pages of a prompt pass from the worker that computed it to the one that generates. Uses neither torch nor
gRPC."""
