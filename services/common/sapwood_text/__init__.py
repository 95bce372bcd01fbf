"""Token ids to text, reasoning and tool calls: a library that router and tokenizer use. Knows no gRPC, and nothing of either."""
