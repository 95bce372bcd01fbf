"""Vocabularies from every kind of file, with what belongs to them. Knows no request and no gRPC."""
