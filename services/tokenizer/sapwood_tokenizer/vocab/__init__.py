"""Vocabularies from every kind of file, with templates and special tokens. Knows no request and no gRPC."""
