"""The chained page hash that router and workers agree on.

The hash of a page covers its own tokens and, through its parent's hash, everything before it: two prompts share the hash of
page i exactly when their first (i + 1) pages are equal (up to collisions of a 128-bit hash; anybody who reuses a page's content
compares the tokens as well). The same chaining as vLLM's and SGLang's block hashes. A page with tokens of pictures is hashed with
their digests behind its tokens. O(n) in the number of tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import xxhash

from sapwood_common.contract.pictures import PictureSpan, digests_within

HASH_BYTES = 16

_U64 = (1 << 64) - 1


def hash_pages(
    tokens: Sequence[int],
    page_size: int,
    *,
    salt: bytes = b"",
    pictures: Sequence[PictureSpan] = (),
    first: int = 0,
) -> list[bytes]:
    """The hashes of all *full* pages of a token sequence, first page first.

    Args:
        tokens: Token ids, each in 0..2**32-1.
        page_size: Tokens a page, at least 1.
        salt: Separates namespaces: equal prompts under different salts share nothing. :func:`cache_namespace` makes it.
        pictures: The prompt's pictures.
        first: The place in the prompt of the first token.
    """
    ids = array("I", tokens)
    if not pictures:
        return hash_run(salt, ids.tobytes(), page_size * ids.itemsize)
    hashes: list[bytes] = []
    for start in range(0, len(ids) - page_size + 1, page_size):
        seen = digests_within(pictures, ids, first + start, first + start + page_size, first)
        salt = xxhash.xxh3_128_digest(salt + ids[start : start + page_size].tobytes() + seen)
        hashes.append(salt)
    return hashes


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


_WEIGHTS = b"\xff"
"""Stands before a digest of weights; no text in UTF-8 has this byte."""
WEIGHTS_BYTES = 16
"""Bytes of a digest of weights."""


def weights_namespace(namespace: bytes, digest: bytes) -> bytes:
    """The namespace of pages that weights of this digest compute.

    Args:
        namespace: Of :func:`cache_namespace`, or of this function for other weights.
        digest: 16 bytes that stand for weights that were updated; empty: those that the worker started with.
    """
    if namespace[-1 - WEIGHTS_BYTES :][:1] == _WEIGHTS:
        namespace = namespace[: -1 - WEIGHTS_BYTES]
        namespace = b"" if namespace == bytes(4) else namespace
    if not digest:
        return namespace
    assert len(digest) == WEIGHTS_BYTES
    return (namespace or bytes(4)) + _WEIGHTS + digest


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
