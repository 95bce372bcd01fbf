"""Limits of a request that two services check alike. The protos name them."""

from __future__ import annotations

MOST_CONTINUATIONS = 128
"""Continuations of one prompt."""
MOST_EMBEDDED = 2048
"""Inputs of one embedding request."""
MOST_SCORED = 4096
"""Nodes of the tree of continuations that one request scores."""
MOST_SCORED_TOKENS = 65536
"""Tokens of all of them."""
MOST_GAPS = 16
"""Texts that one suffix goes with: it is encoded with each."""
MOST_STOPS = 16
"""Stop strings."""
MOST_PRIORITY = 100
"""A request's priority is at most this, and at least its negative."""
MOST_WEIGHT = 1000
"""A tenant's share, relative to others'."""
LONGEST_TARGET_MS = 3_600_000
"""Milliseconds within which a request's first token, or each further one, is to come."""
LONGEST_TENANT = 128
"""Characters of a tenant's name."""
LONGEST_SALT = 256
"""Characters of a cache salt."""
LONGEST_STOP = 4096
"""Characters of a stop string, or of a bad word."""
