"""The public ids of workers: clients see an id, and never an address. Operators see both."""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sapwood_common import errors

_TOKEN = re.compile(r"[^\s,;'\"()]+")
_PLACE = re.compile(
    r"(?<![A-Za-z0-9+.-])[A-Za-z][A-Za-z0-9+.-]*://\S+"  # a URL
    r"|(?:ipv[46]|unix|dns):\S+"  # as gRPC writes addresses
    r"|\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?"
    r"|\[[0-9a-fA-F:.]*:[0-9a-fA-F:.%]*\](?::\d+)?"
    r"|(?<![\w:])[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){3,}"  # IPv6 without brackets
    r"|(?<![\w.-])(?=[\w.-]*[A-Za-z])\w(?:[\w.-]*\w)?:\d{3,5}(?![\w.])"  # a name and a port
)
_PREFIX, _PORT = re.compile("ipv[46]:"), re.compile(r"^[^/]+:\d+$")
_UNKNOWN = "(address)"
_OURS = (
    errors.UnavailableError,
    errors.InternalError,
    errors.ResourceExhaustedError,
    errors.DeadlineExceededError,
    errors.RequestCancelledError,
)
"""Errors that tell of a service; others tell of the request and quote it."""


class WorkerNames:
    """Names workers.

    Args:
        key: A secret for making ids, different in each process, so that nobody can test addresses against the ids.
        is_known: Whether an address is a worker's.
    """

    def __init__(self, key: bytes, is_known: Callable[[str], bool] = lambda address: False) -> None:
        self._key = key
        self._is_known = is_known

    def id_of(self, address: str) -> str:
        """The id of the worker at an address; "-" and "", which stand for none, stay."""
        if address in ("", "-"):
            return address
        return f"w-{hmac.digest(self._key, address.encode(errors='replace'), 'sha256')[:5].hex()}"

    def hide(self, text: str) -> str:
        """A text with ids in place of workers' addresses, also of those that are no longer known, and with no other address."""
        return _PLACE.sub(self._id_of_place, _TOKEN.sub(self._id_if_known, text))

    def for_client(self, error: errors.SapwoodError) -> errors.SapwoodError:
        """The error as its client may see it."""
        if not isinstance(error, _OURS) or (hidden := self.hide(error.message)) == error.message:
            return error
        shown: errors.SapwoodError = type(error).__new__(type(error), hidden)
        vars(shown).update(vars(error), message=hidden)
        return shown

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Errors that leave the body of a ``with`` are as clients may see them."""
        try:
            yield
        except errors.SapwoodError as error:
            shown = self.for_client(error)
            if shown is error:
                raise
            raise shown from None

    def _id_of_place(self, found: re.Match[str]) -> str:
        place = found[0].rstrip(":.")
        address = _PREFIX.sub("", place)
        return (self.id_of(address) if _PORT.search(address) else _UNKNOWN) + found[0][len(place) :]

    def _id_if_known(self, found: re.Match[str]) -> str:
        token = found[0]
        address = token.rstrip(":.")
        return self.id_of(address) + token[len(address) :] if self._is_known(address) else token
