"""Chat templates: conversations to prompts, in Jinja's sandbox. Bounds no time: ``serve`` runs them where they can be ended."""
