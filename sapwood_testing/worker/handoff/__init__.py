"""A simulation of two schedulers, one of which hands prompts off to the other, and of all that goes wrong between them."""
