"""API keys: a file holds the SHA-256 of each, never the key; a key's name says whose a request is.

Keys are 256 random bits, so that a plain hash is enough: there is nothing to guess. A presented key is hashed and compared with
every entry in constant time. The file is read again when it has changed, within a second.

Each line: name, hash in hexadecimal, and optionally the most requests a minute. ``#`` begins a comment.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from sapwood_common.errors import ConfigError, ResourceExhaustedError, UnauthenticatedError

logger = logging.getLogger(__name__)

AUTHORIZATION_KEY = "authorization"
"""Metadata key and HTTP header that carry ``Bearer KEY``."""

_LOOK_INTERVAL = 1.0
_BURST_SECONDS = 10.0


def make_key() -> str:
    """A fresh key."""
    return f"sk-sapwood-{secrets.token_urlsafe(32)}"


def hash_key(key: str) -> str:
    """What the file holds of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


@dataclass(slots=True)
class _Entry:
    """A key and its token bucket; ``per_second`` 0 is without limit."""

    name: str
    digest: str
    per_second: float
    tokens: float = field(init=False)
    filled: float = 0.0

    def __post_init__(self) -> None:
        self.tokens = self.burst

    @property
    def burst(self) -> float:
        """How many requests may come at once."""
        return max(1.0, self.per_second * _BURST_SECONDS)

    def take(self, now: float) -> float:
        """Takes one; returns 0, or the seconds until there is one."""
        if not self.per_second:
            return 0.0
        self.tokens = min(self.burst, self.tokens + (now - self.filled) * self.per_second)
        self.filled = now
        if self.tokens < 1:
            return (1 - self.tokens) / self.per_second
        self.tokens -= 1
        return 0.0


class ApiKeys:
    """The keys of a file.

    Args:
        path: The file.
        clock: Seconds, monotonic.

    Raises:
        ConfigError: It cannot be read or has a wrong line.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._looked = clock()
        self._version = self._stat()
        self._entries = parse_keys(path)

    def check(self, authorization: str) -> str:
        """The name of the key in an ``authorization`` header, from whose rate one request is taken.

        Raises:
            UnauthenticatedError: There is no key, or it is not one of the file's.
            ResourceExhaustedError: The key has no request left for now.
        """
        self._refresh()
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise UnauthenticatedError("an API key is needed: authorization: Bearer KEY")
        digest = hash_key(key.strip())
        found: _Entry | None = None
        for entry in self._entries:
            if hmac.compare_digest(entry.digest, digest):
                found = entry
        if found is None:
            raise UnauthenticatedError("the API key is not known")
        wait = found.take(self._clock())
        if wait:
            raise ResourceExhaustedError("the API key's request rate is used up", retry_after=wait)
        return found.name

    def _refresh(self) -> None:
        now = self._clock()
        if now - self._looked < _LOOK_INTERVAL:
            return
        self._looked = now
        try:
            version = self._stat()
            if version == self._version:
                return
            entries = parse_keys(self._path)
        except ConfigError as error:
            logger.warning("the API keys are kept as they were: %s", error)
            return
        self._version = version
        before = {entry.digest: entry for entry in self._entries}
        for entry in entries:  # who has used up his rate does not get it anew
            if (old := before.get(entry.digest)) is not None and old.per_second == entry.per_second:
                entry.tokens, entry.filled = old.tokens, old.filled
        self._entries = entries
        logger.info("%d API keys read from %s", len(entries), self._path)

    def _stat(self) -> tuple[int, int, int]:
        try:
            stat = self._path.stat()
        except OSError as error:
            raise ConfigError(f"--api-keys: cannot read {self._path}: {error.strerror}") from None
        return (stat.st_mtime_ns, stat.st_size, stat.st_ino)


def parse_keys(path: Path) -> list[_Entry]:
    """The entries of a file.

    Raises:
        ConfigError: It cannot be read, or a line is wrong; the message has its number and nothing of its content.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-keys: cannot read {path}: {error}") from None
    return [
        _parse(words, f"--api-keys: {path}, line {number}")
        for number, line in enumerate(lines, start=1)
        if (words := line.partition("#")[0].split())
    ]


def _parse(words: list[str], where: str) -> _Entry:
    if len(words) not in (2, 3):
        raise ConfigError(f"{where}: not a name, a SHA-256 and perhaps a rate")
    name, digest, *rate = words
    if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise ConfigError(f"{where}: the second word is not a SHA-256 in hexadecimal")
    if rate and not (rate[0].isdecimal() and int(rate[0]) >= 1):
        raise ConfigError(f"{where}: the third word is not a number of requests a minute")
    return _Entry(name, digest, int(rate[0]) / 60 if rate else 0.0)
