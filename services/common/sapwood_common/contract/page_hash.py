"""The chained page hash that router and workers agree on.

The hash of a page covers its own tokens and, through its parent's hash, everything before it: two prompts share the hash of
page i exactly when their first (i + 1) pages are equal (up to collisions of a 128-bit hash; anybody who reuses a page's content
compares the tokens as well). The same chaining as vLLM's and SGLang's block hashes. O(n) in the number of tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import xxhash

HASH_BYTES = 16

_U64 = (1 << 64) - 1


def hash_pages(tokens: Sequence[int], page_size: int, *, salt: bytes = b"") -> list[bytes]:
    """The hashes of all *full* pages of a token sequence, first page first.

    Args:
        tokens: Token ids, each in 0..2**32-1.
        page_size: Tokens a page, at least 1.
        salt: Separates namespaces: equal prompts under different salts share nothing. :func:`cache_namespace` makes it.
    """
    ids = array("I", tokens)
    return hash_run(salt, ids.tobytes(), page_size * ids.itemsize)


def hash_run(parent: bytes, raw: bytes, stride: int) -> list[bytes]:
    """The hashes of the whole pages of ``stride`` bytes in ``raw`` (token ids as native uint32) below ``parent``."""
    hashes: list[bytes] = []
    for start in range(0, len(raw) - stride + 1, stride):
        parent = xxhash.xxh3_128_digest(parent + raw[start : start + stride])
        hashes.append(parent)
    return hashes


def cache_namespace(cache_salt: str, lora: str = "") -> bytes:
    """The salt of the hash chain for requests under a tenant's cache salt and a LoRA; empty if both are.

    Two requests share cached pages only if both are equal.
    """
    if not cache_salt and not lora:
        return b""
    name = lora.encode()
    return len(name).to_bytes(4, "big") + name + cache_salt.encode()


def lora_of(namespace: bytes) -> str:
    """The LoRA that a namespace of :func:`cache_namespace` was made with."""
    return namespace[4 : 4 + int.from_bytes(namespace[:4], "big")].decode()


def digest_term(page_hash: bytes, medium: int = 0) -> int:
    """What one cached page adds to the digest of a cache.

    The digest is the exclusive or of the terms of all cached pages. So it does not depend on the order in which pages came, and
    to remove a page is the same operation as to add it. Equal caches have equal digests.

    Args:
        page_hash: The page's hash.
        medium: 0 for the device, 1 for the host's memory, 2 for a store.

    Returns:
        An unsigned 64-bit number.
    """
    return int.from_bytes(page_hash[:8], "big") * (2 * medium + 1) & _U64
