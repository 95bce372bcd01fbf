"""Token ids to text that is certain: characters, stop strings, then the output's parsers. Knows no gRPC."""
