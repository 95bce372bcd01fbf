"""Tools that the router itself calls for a model: those of MCP servers. Knows no request and no API."""
