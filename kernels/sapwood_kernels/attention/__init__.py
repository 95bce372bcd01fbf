"""Attention over the paged cache: kernels and wrappers of kernel libraries, all planned and called in the same way."""
