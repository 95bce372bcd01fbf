"""What a model's text means: reasoning, tool calls, and grammars that make it so. Knows no token and no gRPC."""
