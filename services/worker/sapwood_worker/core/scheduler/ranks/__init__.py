"""Plans for ranks that have requests of their own: a scheduler for each, and what goes to which. Knows no model."""
