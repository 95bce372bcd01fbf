"""The kinds of stores by the schemes of their URLs; packages add theirs as entry points of ``GROUP``."""

from __future__ import annotations

from collections.abc import Callable

from sapwood_common.errors import ConfigError
from sapwood_common.plugins import find_part
from sapwood_worker.core.cache.storage import file, mooncake_store, nixl_store
from sapwood_worker.core.cache.storage.backend import StorageBackend
from sapwood_worker.core.cache.storage.url import StorageUrl

GROUP = "sapwood.storage"

Open = Callable[[], StorageBackend]
"""Opens a store; may block and fail with StorageError."""

_KINDS: dict[str, Callable[[StorageUrl], Open]] = {
    "file": file.parse_url,
    "mooncake": mooncake_store.parse_url,
    "nixl": nixl_store.parse_url,
}


def parse_storage(text: str) -> Open:
    """Returns a function that opens the store of a URL. Parsing neither blocks nor opens anything.

    Raises:
        ConfigError: It is not such a URL; the message says what is wrong with it.
    """
    url = StorageUrl(text)
    try:
        parse = find_part(GROUP, url.scheme, _KINDS)
    except ConfigError as error:
        raise ConfigError(f"--storage: {text!r} names no kind of store: {error}") from None
    opened = parse(url)
    url.finish()
    return opened
