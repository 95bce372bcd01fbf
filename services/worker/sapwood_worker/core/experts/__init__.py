"""Where the experts of a mixture are: how evenly their tokens fall on ranks, and what moves. Knows no model."""
