"""All floods."""

from __future__ import annotations

from floods.flood import Flood
from floods.http1_floods import HTTP1_FLOODS
from floods.http2_floods import HTTP2_FLOODS

FLOODS: tuple[Flood, ...] = (*HTTP2_FLOODS, *HTTP1_FLOODS)
