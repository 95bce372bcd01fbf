"""Weights of 4 and 8 bits: the one layout of those with scales for groups of a row, int8, and the products with them."""
