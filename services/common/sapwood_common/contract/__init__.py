"""What two services must hold alike: page hashes, seeds, sampling fields. Knows no service."""
