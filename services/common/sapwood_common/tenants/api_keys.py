"""API keys: a file holds the SHA-256 of each, never the key; a key's name says which tenant a request belongs to.

Keys are 256 random bits, so that a plain hash is enough: there is nothing to guess. A presented key is hashed and compared with
every entry in constant time. The file is read again when it has changed, within a second.

Each line: name, hash in hexadecimal, and optionally the most requests a minute, ``tokens=`` the most tokens a minute,
``weight=`` the share of busy workers (1 if not given) and ``priority=`` the highest priority that requests may have (0 if not
given). Lines of one name are keys of one tenant, and the first of them says what holds for all. The tenant's cache salt is minted
from name and first hash: so it is the same on all routers, and nobody can guess it. ``#`` begins a comment.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from sapwood_common.contract.limits import MOST_PRIORITY, MOST_WEIGHT
from sapwood_common.errors import ConfigError, UnauthenticatedError
from sapwood_common.tenants.tenant import Tenant, TenantSettings, mint_salt

logger = logging.getLogger(__name__)

AUTHORIZATION_KEY = "authorization"
"""Metadata key and HTTP header that carry ``Bearer KEY``."""

_LOOK_INTERVAL = 1.0


def make_key() -> str:
    """A fresh key."""
    return f"sk-sapwood-{secrets.token_urlsafe(32)}"


def hash_key(key: str) -> str:
    """The SHA-256 of a key in hexadecimal, which the file holds in its place."""
    return hashlib.sha256(key.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """A line: a key's hash, and what its line says of the tenant (``settings`` without a salt)."""

    digest: str
    settings: TenantSettings


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
        self._tenants: dict[str, Tenant] = {}
        self._entries = parse_keys(path)
        self._open_accounts()

    def check(self, authorization: str) -> Tenant:
        """The tenant of the key in an ``authorization`` header, from whose rate one request is taken.

        Raises:
            UnauthenticatedError: There is no key, or it is not one of the file's.
            ResourceExhaustedError: The tenant has no request left for now.
        """
        tenant = self.find(authorization)
        tenant.begin_request()
        return tenant

    def find(self, authorization: str) -> Tenant:
        """The tenant of the key in an ``authorization`` header. Takes nothing from its rate.

        Raises:
            UnauthenticatedError: There is no key, or it is not one of the file's.
        """
        self._refresh()
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise UnauthenticatedError("an API key is needed: authorization: Bearer KEY")
        digest = hash_key(key.strip())
        found: KeyEntry | None = None
        for entry in self._entries:
            if hmac.compare_digest(entry.digest, digest):
                found = entry
        if found is None:
            raise UnauthenticatedError("the API key is not known")
        return self._tenants[found.settings.name]

    def _open_accounts(self) -> None:
        """Makes each tenant's account. A tenant whose settings are as before keeps its account, and what it has used up."""
        before, self._tenants = self._tenants, {}
        for entry in self._entries:
            name = entry.settings.name
            if name in self._tenants:
                continue
            settings = replace(entry.settings, cache_salt=mint_salt(name, entry.digest))
            old = before.get(name)
            same = old is not None and old.settings == settings
            self._tenants[name] = old if old is not None and same else Tenant(settings, self._clock)

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
        self._entries = entries
        self._open_accounts()
        logger.info("%d API keys read from %s", len(entries), self._path)

    def _stat(self) -> tuple[int, int, int]:
        try:
            stat = self._path.stat()
        except OSError as error:
            raise ConfigError(f"--api-keys: cannot read {self._path}: {error.strerror}") from None
        return (stat.st_mtime_ns, stat.st_size, stat.st_ino)


def parse_keys(path: Path) -> list[KeyEntry]:
    """The entries of a file.

    Raises:
        ConfigError: The file cannot be read, or a line is wrong; the message has the line's number and nothing of its content.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--api-keys: cannot read {path}: {why}") from None
    return [
        _parse(words, f"--api-keys: {path}, line {number}")
        for number, line in enumerate(lines, start=1)
        if (words := line.partition("#")[0].split())
    ]


def _parse(words: list[str], where: str) -> KeyEntry:
    if len(words) < 2:
        raise ConfigError(f"{where}: not a name, a SHA-256 and perhaps what the key may do")
    name, digest, *rest = words
    if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise ConfigError(f"{where}: the second word is not a SHA-256 in hexadecimal")
    requests = tokens = priority = 0
    weight = 1.0
    for place, word in enumerate(rest):
        kind, equals, value = word.partition("=")
        if not equals and place == 0:
            requests = _whole(word, f"{where}: the third word is not a number of requests a minute")
        elif kind == "tokens":
            tokens = _whole(value, f"{where}: tokens= is not followed by a number of tokens a minute")
        elif kind == "weight":
            weight = _weight(value, f"{where}: weight= is not followed by a number above 0, at most {MOST_WEIGHT}")
        elif kind == "priority":
            asked = f"a whole number in -{MOST_PRIORITY}..{MOST_PRIORITY}"
            priority = _priority(value, f"{where}: priority= is not followed by {asked}")
        else:
            raise ConfigError(
                f"{where}: after name, SHA-256 and requests a minute come only tokens=, weight= and priority="
            )
    return KeyEntry(digest, TenantSettings(name, requests, tokens, weight, priority))


def _whole(text: str, problem: str) -> int:
    if not (text.isdecimal() and int(text) >= 1):
        raise ConfigError(problem)
    return int(text)


def _weight(text: str, problem: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0 < weight <= MOST_WEIGHT:
        raise ConfigError(problem)
    return weight


def _priority(text: str, problem: str) -> int:
    try:
        priority = int(text)
    except ValueError:
        priority = MOST_PRIORITY + 1
    if not -MOST_PRIORITY <= priority <= MOST_PRIORITY:
        raise ConfigError(problem)
    return priority
