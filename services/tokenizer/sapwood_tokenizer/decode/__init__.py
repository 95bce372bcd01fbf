"""Token ids to text that is certain: characters, stop strings, then the output's parsers. No gRPC."""
