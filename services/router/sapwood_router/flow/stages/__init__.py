"""The stages of a request's way, one file each, in the order that ``pipeline`` runs them. Know no edge."""
