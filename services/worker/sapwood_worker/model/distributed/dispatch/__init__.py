"""Rows that go from rank to rank by their experts. Knows no layers."""
