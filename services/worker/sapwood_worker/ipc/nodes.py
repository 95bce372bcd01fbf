"""The other nodes of a group, as the first one sees them: they come, are told when to start their ranks, and are watched."""

from __future__ import annotations

import asyncio
import logging
import secrets

from sapwood_common.errors import ConfigError
from sapwood_common.network.keyed_ways import (
    HELLO_SECONDS,
    KEY_BYTES,
    StrangerError,
    Strangers,
    derive,
    greet,
    listen,
)
from sapwood_worker.config import WorkerConfig
from sapwood_worker.ipc.node_link import (
    LINK,
    STEPS,
    STORE,
    Begin,
    End,
    Hello,
    LinkLostError,
    Loaded,
    NodeLink,
    RankEnded,
    Refused,
    Standings,
    join_streams,
)
from sapwood_worker.ipc.standing import Standing

logger = logging.getLogger(__name__)

_FIRST_SECONDS = 120.0
"""Seconds that the other nodes get to come at the start. Once they were there they are waited for without end."""
_SILENCE_SECONDS = 1.5
_REMINDER_SECONDS = 30.0


class Meeting:
    """Where the ranks of one epoch meet: two listening sockets, which rank 0 gets.

    Args:
        host: Their address.
        key: The group's.

    Attributes:
        store: For torch's rendezvous, which asks for no key: only this host's processes reach it, others through :class:`Nodes`.
        steps: For connections by which ranks of other nodes get their steps.
        salt: Makes ``key`` of the group's.
        key: What those show that they know.
    """

    def __init__(self, host: str, key: bytes) -> None:
        self.store, self.steps = listen("127.0.0.1"), listen(host)
        self.salt = secrets.token_bytes(KEY_BYTES)
        self.key = derive(key, STEPS, self.salt)

    def close(self) -> None:
        """Closes this process's sockets."""
        self.store.close()
        self.steps.close()


class Nodes:
    """Listens for the other nodes and keeps the connections to them.

    Life cycle: construct, :meth:`start`, then for each epoch :meth:`gather`, :meth:`begin` and :meth:`end`; :meth:`close`.

    Args:
        config: This node's configuration.

    Attributes:
        host: The address at which ranks meet.
        key: The group's.
        one_left: Whether a node was lost in this epoch, which may come again.
        standings: How far the other nodes' ranks have come in this epoch, by the node.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self._hello = Hello.of(config)
        self.key = config.group_key
        self._strangers = Strangers()
        self._store_port = 0
        self._nnodes, self._each = config.nnodes, config.ranks // config.nnodes
        self._all = config.ranks
        self.host, self._port = config.meeting_place
        self._links: dict[int, NodeLink] = {}
        self._refusals: list[str] = []
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._epoch = 0
        self._was_whole = False
        self.one_left = False
        self.standings: dict[int, list[Standing]] = {}
        self._lost: asyncio.Future[tuple[int, str]] | None = None

    async def start(self) -> None:
        """Begins to listen.

        Raises:
            ConfigError: It cannot.
        """
        try:
            self._server = await asyncio.start_server(self._serve, self.host, self._port)
        except OSError as error:
            raise ConfigError(f"--rendezvous {self.host}:{self._port}: cannot listen there: {error}") from error
        logger.info("waiting for %d more nodes at %s:%d", self._nnodes - 1, self.host, self._port)

    async def gather(self) -> None:
        """Waits until all nodes are there.

        Raises:
            ConfigError: At the first time one did not come; says which, and why if that is known.
        """
        waited = 0.0
        while missing := [node for node in range(1, self._nnodes) if node not in self._links]:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), _REMINDER_SECONDS)
            except TimeoutError:
                waited += _REMINDER_SECONDS
                names = ", ".join(map(self._name, missing))
                why = f"; refused: {'; '.join(self._refusals)}" if self._refusals else ""
                said = f"{names} did not come to {self.host}:{self._port} within {waited:.0f} s{why}"
                if waited >= _FIRST_SECONDS and not self._was_whole:
                    raise ConfigError(said) from None
                logger.warning("%s: waiting", said)
        self._was_whole = True
        self._refusals.clear()

    def begin(self, meeting: Meeting) -> asyncio.Future[tuple[int, str]]:
        """Has the nodes start their ranks; the result is the first rank that is lost and how."""
        self._epoch += 1
        self.one_left = False
        self.standings = {}
        self._lost = asyncio.get_running_loop().create_future()
        self._store_port = meeting.store.getsockname()[1]
        message = Begin(self._epoch, meeting.steps.getsockname()[1], meeting.salt)
        for node in range(1, self._nnodes):
            if node in self._links:
                self._links[node].send(message)
            else:
                self.one_left = True
                self._lose(node * self._each, f"{self._name(node)} has left")
        return self._lost

    def loaded(self) -> None:
        """Tells the nodes that all ranks have loaded their model."""
        for link in self._links.values():
            link.send(Loaded())

    def end(self) -> None:
        """Has the nodes end their ranks."""
        for link in self._links.values():
            link.send(End())

    async def close(self) -> None:
        """Lets the nodes go. Never fails."""
        if self._server is not None:
            self._server.close()
        for link in list(self._links.values()):
            link.close()

    def _name(self, node: int) -> str:
        first = node * self._each
        ranks = f"rank {first}" if self._each == 1 else f"ranks {first} to {first + self._each - 1}"
        return f"node {node} ({ranks} of {self._all})"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stranger = self._strangers.enter(writer.close)
        try:
            kind, number = await greet(reader, writer, self.key)
        except StrangerError as error:
            logger.debug("a stranger at --rendezvous: %s", error)
            writer.close()
            return
        finally:
            self._strangers.leave(stranger)
        if kind == LINK:
            await self._serve_node(NodeLink(reader, writer, _SILENCE_SECONDS))
        elif kind == STORE and number == self._epoch:
            await join_streams(reader, writer, "127.0.0.1", self._store_port)
        else:
            writer.close()

    async def _serve_node(self, link: NodeLink) -> None:
        node = 0
        try:
            hello = await asyncio.wait_for(link.receive(), HELLO_SECONDS)
            if not isinstance(hello, Hello):
                raise LinkLostError("it said no hello")
            if reason := self._refusal(hello):
                logger.error("node %d is refused: %s", hello.node, reason)
                self._refusals = [*self._refusals[-3:], f"node {hello.node}: {reason}"]
                link.send(Refused(reason))
                return
            node = hello.node
            self._links[node] = link
            self._changed.set()
            logger.info("%s has come", self._name(node))
            while True:
                match await link.receive():
                    case RankEnded(epoch, rank, how):
                        if epoch == self._epoch:
                            self._lose(rank, f"rank {rank} of {self._all} (node {node}): {how}")
                    case Standings(epoch, ranks):
                        if epoch == self._epoch:
                            self.standings[node] = ranks
                    case _:
                        raise LinkLostError("it speaks another language")
        except (LinkLostError, TimeoutError) as error:
            if node:
                logger.error("%s is lost: %s", self._name(node), error)
                self.one_left = True
                self._lose(node * self._each, f"{self._name(node)} is lost: {error}")
        finally:
            if self._links.get(node) is link:
                del self._links[node]
            link.close()

    def _refusal(self, hello: Hello) -> str:
        if not 0 < hello.node < self._nnodes:
            return f"--node-rank {hello.node} is not from 1 to {self._nnodes - 1}"
        if hello.node in self._links:
            return f"node {hello.node} is there already"
        return self._hello.difference(hello)

    def _lose(self, rank: int, how: str) -> None:
        if self._lost is not None and not self._lost.done():
            self._lost.set_result((rank, how))
