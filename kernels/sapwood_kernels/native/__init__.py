"""The CPU's C code: the library, its build and its calls."""
