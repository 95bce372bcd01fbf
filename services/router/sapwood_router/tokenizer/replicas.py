"""The replicas of the tokenizer as they come and go: given by address, or found behind a name that stands for all of them.

A replica that is no longer behind its name gets nothing new. What it has it finishes; then its connection is closed. So is the
connection of each replica, in favour of a new one, when the TLS files have changed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from sapwood_common.errors import ConfigError
from sapwood_common.network.channel import Dialer
from sapwood_router.tokenizer.replica import TokenizerReplica
from sapwood_router.transport.name_lookup import Lookup, follow_name, name_in

logger = logging.getLogger(__name__)

_LOOKUP_INTERVAL = 1.0
_FILES_INTERVAL = 1.0


class TokenizerReplicas:
    """Keeps the set of replicas. Lives on one event loop.

    Args:
        targets: ``host:port`` of each replica, or of all behind a host name.
        dialer: Connects to them; to one behind a name checking its certificate for that name.
        health_interval: Seconds between two checks of each.
        on_change: Called when the set or a replica's health has changed.
        on_lost: Called when a connection is lost: the service that answers next may be another.
        spawn: Runs a task until the router stops.
        lookup: Asks for the addresses behind a name.
    """

    def __init__(
        self,
        targets: Iterable[str],
        dialer: Dialer,
        health_interval: float,
        on_change: Callable[[], None],
        on_lost: Callable[[], None],
        spawn: Callable[[Coroutine[Any, Any, None], str], object],
        lookup: Lookup,
    ) -> None:
        self._targets = tuple(targets)
        self._dialer = dialer
        self._health_interval = health_interval
        self._on_change = on_change
        self._on_lost = on_lost
        self._spawn = spawn
        self._lookup = lookup
        self._found: dict[str, tuple[TokenizerReplica, ...]] = {}

    def all(self) -> tuple[TokenizerReplica, ...]:
        """The replicas there are now; those that leave are not among them."""
        return tuple(replica for replicas in self._found.values() for replica in replicas)

    def start(self) -> None:
        """Takes up those with an address, and begins to look for the others."""
        for target in self._targets:
            named = name_in(target)
            if named is None:
                self._found[target] = (self._open(target, self._dialer),)
            else:
                self._spawn(self._follow(target, *named), f"addresses behind {target}")
        self._spawn(self._follow_files(), "TLS files for the tokenizer")

    async def _follow(self, target: str, host: str, port: int) -> None:
        dialer = self._dialer.expecting(host)

        def found(addresses: frozenset[str]) -> None:
            before = self._found.get(target, ())
            known = {replica.address for replica in before}
            stay = tuple(replica for replica in before if replica.address in addresses)
            come = tuple(self._open(address, dialer) for address in sorted(addresses - known))
            self._replace(target, stay + come)

        await follow_name(host, port, found, _LOOKUP_INTERVAL, self._lookup)

    async def _follow_files(self) -> None:
        version = self._dialer.version()
        while version is not None:
            await asyncio.sleep(_FILES_INTERVAL)
            try:
                found = self._dialer.version()
                if found == version:
                    continue
                for target, replicas in tuple(self._found.items()):
                    self._replace(
                        target, tuple(self._open(item.address, item.dialer, item.problem) for item in replicas)
                    )
                version = found
                logger.info("the TLS files have changed: new connections to the tokenizer")
            except (OSError, ConfigError) as error:  # half written: again when they are whole
                logger.warning("new TLS files are not taken up: %s", error)

    def _open(self, address: str, dialer: Dialer, problem: str | None = "not checked yet") -> TokenizerReplica:
        replica = TokenizerReplica(address, dialer, self._on_lost, problem)
        self._spawn(self._serve(replica), f"tokenizer {address}")
        return replica

    def _replace(self, target: str, replicas: tuple[TokenizerReplica, ...]) -> None:
        before = self._found.get(target, ())
        self._found[target] = replicas
        for gone in before:
            if gone not in replicas:
                gone.encodings.finish()
        logger.info("tokenizers at %s: %s", target, ", ".join(replica.address for replica in replicas))
        self._on_change()

    async def _serve(self, replica: TokenizerReplica) -> None:
        """Carries its items, and watches its health, until it has left with nothing running."""
        monitor = asyncio.ensure_future(replica.monitor(self._health_interval, self._on_change))
        try:
            await replica.encodings.run()
            await replica.idle()
        finally:
            monitor.cancel()
            await replica.channel.close()
