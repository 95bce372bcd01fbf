"""API keys: a file holds the SHA-256 of each, never the key; a key's name says which tenant a request belongs to.

Keys are 256 random bits, so that a plain hash is enough: there is nothing to guess. A presented key is hashed and compared with
every entry in constant time. The file is read again when it has changed, within a second. A key that is gone from it is revoked:
what runs with it ends. So are all keys if the file is deleted. One that is empty, broken or unreadable leaves them as they were.

Each line: name, hash in hexadecimal, and optionally the most requests a minute, ``tokens=`` the most tokens a minute,
``weight=`` the share of busy workers (1 if not given) and ``priority=`` the highest priority that requests may have (0 if not
given). ``ttft-ms=`` and ``tpot-ms=`` are targets for the first token and for each further one, in milliseconds: ``500``, or
``200-2000`` for what requests may name; those that name none have the larger. ``operator`` lets requests do what operators do
over HTTP, such as to change weights. Lines of one name are keys of one tenant, and the first of them says what holds for all. The
tenant's cache salt is minted from name and first hash: so it is the same on all routers, and nobody can guess it. ``#`` begins a
comment.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import math
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from sapwood_common.contract.limits import LONGEST_TARGET_MS, MOST_PRIORITY, MOST_WEIGHT
from sapwood_common.errors import ConfigError, UnauthenticatedError
from sapwood_common.secret_file import warn_of_writers
from sapwood_common.tenants.tenant import TargetRange, Tenant, TenantSettings, mint_salt

logger = logging.getLogger(__name__)

AUTHORIZATION_KEY = "authorization"
"""Metadata key and HTTP header that carry ``Bearer KEY``."""

FIRST_TOKEN, EACH_TOKEN = TARGETS = ("ttft-ms", "tpot-ms")
"""Words of a line that set targets."""

_LOOK_INTERVAL = 1.0
_FOLLOW_SECONDS = 0.4
_REVOKED = "the API key was revoked"
_MOST_BYTES = 64 << 20
_MOST_DIGITS = 15
_Version = tuple[int, int, int] | None


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


class Key(Tenant):
    """A key's view of its tenant, whose allowances it shares; says when it is revoked.

    Args:
        tenant: The tenant.

    Attributes:
        is_revoked: Whether it was revoked.
    """

    def __init__(self, tenant: Tenant) -> None:
        self._watchers: list[Callable[[], None]] = []
        self.is_revoked = False
        self.belong_to(tenant)

    def belong_to(self, tenant: Tenant) -> None:
        """It is a key of this tenant, at this moment."""
        self.settings, self._requests, self._tokens = tenant.settings, tenant._requests, tenant._tokens

    def watch(self, revoked: Callable[[], None]) -> None:
        """Has a function called, once, when the key is revoked."""
        self._watchers.append(revoked)

    def unwatch(self, revoked: Callable[[], None]) -> None:
        """Undoes :meth:`watch`."""
        with suppress(ValueError):
            self._watchers.remove(revoked)

    def revoke(self) -> int:
        """Ends what runs with the key; returns how much that is."""
        self.is_revoked = True
        watchers, self._watchers = self._watchers, []
        for revoked in watchers:
            revoked()
        return len(watchers)


@contextmanager
def until_revoked(tenant: Tenant | None) -> Iterator[None]:
    """Cancels the body of a ``with`` when the key that it runs with is revoked.

    Args:
        tenant: From :meth:`ApiKeys.check`; None: there is no key.

    Raises:
        UnauthenticatedError: The key was revoked.
    """
    if not isinstance(tenant, Key):
        yield
        return
    if tenant.is_revoked:  # while the request waited for its turn
        raise UnauthenticatedError(_REVOKED)
    task, over = asyncio.current_task(), False
    assert task is not None

    def end() -> None:
        nonlocal over
        over = True
        task.cancel()

    tenant.watch(end)
    try:
        yield
    except asyncio.CancelledError:
        if not over:
            raise
        task.uncancel()
        raise UnauthenticatedError(_REVOKED) from None
    finally:
        tenant.unwatch(end)


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
        self._told: str | None = None
        self._tenants: dict[str, Tenant] = {}
        self._keys: dict[str, Key] = {}
        if self._version is None:
            raise ConfigError(f"--api-keys: cannot read {path}: there is no such file")
        self._entries = parse_keys(path)
        warn_of_writers(path, "--api-keys")
        self._open_accounts()

    async def follow(self) -> None:
        """Reads changes of the file, without end, even while there are no requests."""
        while True:
            await asyncio.sleep(_FOLLOW_SECONDS)
            self.refresh()

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
        if self._clock() - self._looked >= _LOOK_INTERVAL:
            self.refresh()
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
        return self._keys[found.digest]

    def named(self, name: str) -> Tenant:
        """The tenant of a name, for what runs without a request of its own.

        Raises:
            UnauthenticatedError: It has no key any more.
        """
        self.refresh()
        if name not in self._tenants:
            raise UnauthenticatedError(_REVOKED)
        return self._tenants[name]

    def _open_accounts(self) -> None:
        """Makes each tenant's account. A tenant with unchanged settings keeps its account and its usage."""
        before, self._tenants = self._tenants, {}
        for entry in self._entries:
            name = entry.settings.name
            if name in self._tenants:
                continue
            settings = replace(entry.settings, cache_salt=mint_salt(name, entry.digest))
            old = before.get(name)
            same = old is not None and old.settings == settings
            self._tenants[name] = old if old is not None and same else Tenant(settings, self._clock)
        known, self._keys = self._keys, {}
        for entry in self._entries:
            tenant = self._tenants[entry.settings.name]
            if entry.digest not in self._keys:
                self._keys[entry.digest] = known.pop(entry.digest) if entry.digest in known else Key(tenant)
            self._keys[entry.digest].belong_to(tenant)
        ended = sum(key.revoke() for key in known.values())
        if known:
            logger.warning("%d API keys revoked: %d requests that ran with them end", len(known), ended)

    def refresh(self) -> None:
        """Reads the file again if it has changed, and revokes the keys that are gone."""
        self._looked = self._clock()
        try:
            version = self._stat()
            if version == self._version:
                return
            entries = [] if version is None else parse_keys(self._path)
            if version is not None and not entries:
                raise ConfigError(f"--api-keys: {self._path} holds no key; to revoke all, delete it")
        except ConfigError as error:
            if str(error) != self._told:
                self._told = str(error)
                logger.warning("the API keys are kept as they were: %s", error)
            return
        self._told = None
        self._version = version
        self._entries = entries
        self._open_accounts()
        if version is None:
            logger.warning("%s is deleted: no API key is known any more", self._path)
        else:
            logger.info("%d API keys read from %s", len(entries), self._path)

    def _stat(self) -> _Version:
        """What changes when the file does; None: there is none."""
        try:
            found = self._path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise ConfigError(f"--api-keys: cannot read {self._path}: {error.strerror}") from None
        return (found.st_mtime_ns, found.st_size, found.st_ino)


def parse_keys(path: Path) -> list[KeyEntry]:
    """The entries of a file.

    Raises:
        ConfigError: The file cannot be read, or a line is wrong; the message has the line's number and nothing of its content.
    """
    try:
        lines = _read(path).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--api-keys: cannot read {path}: {why}") from None
    return [
        _parse(words, f"--api-keys: {path}, line {number}")
        for number, line in enumerate(lines, start=1)
        if (words := line.partition("#")[0].split())
    ]


def _read(path: Path) -> bytes:
    """The content of a file, at most so much; of a pipe or a device, which might never end, nothing is read."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ConfigError(f"--api-keys: {path} is no file")
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ConfigError(f"--api-keys: {path} has more than {_MOST_BYTES} bytes")
    return content


def _parse(words: list[str], where: str) -> KeyEntry:
    if len(words) < 2:
        raise ConfigError(f"{where}: not a name, a SHA-256 and perhaps what the key may do")
    name, digest, *rest = words
    if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise ConfigError(f"{where}: the second word is not a SHA-256 in hexadecimal")
    requests = tokens = priority = 0
    weight, operator = 1.0, False
    targets: dict[str, TargetRange | None] = dict.fromkeys(TARGETS)
    for place, word in enumerate(rest):
        kind, equals, value = word.partition("=")
        if not equals and place == 0 and word != "operator":
            requests = _whole(word, f"{where}: the third word is not a number of requests a minute")
        elif kind == "tokens":
            tokens = _whole(value, f"{where}: tokens= is not followed by a number of tokens a minute")
        elif kind == "weight":
            weight = _weight(value, f"{where}: weight= is not followed by a number above 0, at most {MOST_WEIGHT}")
        elif kind == "priority":
            asked = f"a whole number in -{MOST_PRIORITY}..{MOST_PRIORITY}"
            priority = _priority(value, f"{where}: priority= is not followed by {asked}")
        elif kind in targets:
            asked = f"milliseconds such as 500 or 200-2000, at most {LONGEST_TARGET_MS}"
            targets[kind] = parse_targets(value, f"{where}: {kind}= is not followed by {asked}")
        elif word == "operator":
            operator = True
        else:
            raise ConfigError(
                f"{where}: after name, SHA-256 and requests a minute come only tokens=, weight=, priority=, ttft-ms=, tpot-ms= "
                "and operator"
            )
    settings = TenantSettings(
        name,
        requests,
        tokens,
        weight,
        priority,
        operator=operator,
        first_token=targets[FIRST_TOKEN],
        each_token=targets[EACH_TOKEN],
    )
    return KeyEntry(digest, settings)


def parse_targets(text: str, problem: str) -> TargetRange:
    """A range of targets. Raises ConfigError with ``problem`` where the text is none."""
    found = re.fullmatch(r"([0-9]{1,8}(?:\.[0-9]{1,3})?)(?:-([0-9]{1,8}(?:\.[0-9]{1,3})?))?", text)
    least, most = (float(found[1]), float(found[2] or found[1])) if found else (0.0, 0.0)
    if not 0 < least <= most <= LONGEST_TARGET_MS:
        raise ConfigError(problem)
    return TargetRange(least, most)


def _whole(text: str, problem: str) -> int:
    if not (text.isdecimal() and len(text) <= _MOST_DIGITS and int(text) >= 1):
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
