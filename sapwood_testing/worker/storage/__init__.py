"""Stand-ins for stores of pages."""
