"""What a request is, in plain values: who asks, for what, on what terms. Knows no service, no worker and no gRPC."""
