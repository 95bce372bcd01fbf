"""The second tier's page half: which page of the host's memory holds what, and what is being written there."""
