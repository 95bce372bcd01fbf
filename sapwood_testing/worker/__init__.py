"""A worker without a model, and stand-ins for its parts: runner, transfer, store, tree."""
