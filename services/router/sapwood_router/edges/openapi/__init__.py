"""The HTTP API described in OpenAPI: a document, and a page to read it. Made of the routes; knows no request."""
