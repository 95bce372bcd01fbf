"""Accuracy of a served model on small tasks from a file. Knows the server by its API only, and no command line.

Needs the extra ``bench``, whose :mod:`~sapwood.bench.targets` it asks.
"""
