"""A request in plain values: its caller, its content, and its scheduling parameters. Knows no service, no worker and no gRPC."""
