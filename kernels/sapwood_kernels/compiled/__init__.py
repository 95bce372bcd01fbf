"""Compiled kernels as files: archives of what the compilers made, and compiling ahead of need. Knows no kernel."""
