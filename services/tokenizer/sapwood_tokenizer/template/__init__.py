"""Chat templates: conversations to prompts, in a sandbox, on threads. Knows no vocabulary and no gRPC."""
