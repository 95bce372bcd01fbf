"""All floods."""

from __future__ import annotations

from floods.flood import Flood
from floods.http1_floods import HTTP1_FLOODS
from floods.http2_floods import HTTP2_FLOODS
from floods.idle_floods import IDLE_FLOODS
from floods.keyed_floods import KEYED_FLOODS

FLOODS: tuple[Flood, ...] = (*HTTP2_FLOODS, *HTTP1_FLOODS, *IDLE_FLOODS, *KEYED_FLOODS)
