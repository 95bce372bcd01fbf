"""Structured output in the worker: which tokens may come next. Imports neither torch nor protobuf, ``front`` aside.

``state`` is what scheduler and runner know of it; ``matcher`` is one request's, ``store`` makes it, ``pending`` waits for it,
``token_masks`` fills a step's masks while the model computes, ``front`` is the gRPC side.
"""
