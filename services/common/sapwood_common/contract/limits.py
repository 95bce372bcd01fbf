"""How much a request may ask for, where two services check it alike. The protos name these."""

from __future__ import annotations

MOST_CONTINUATIONS = 128
"""Of one prompt."""
MOST_EMBEDDED = 2048
"""Inputs of one embedding request."""
MOST_STOPS = 16
"""Stop strings."""
LONGEST_TENANT = 128
"""Characters of a tenant's name."""
LONGEST_SALT = 256
"""Characters of a cache salt."""
