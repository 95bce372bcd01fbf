"""Answers subscribers that missed KV events, in a thread of its own: however much they ask, the front goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from sapwood_common.errors import ConfigError
from sapwood_common.secret_file import warn_of_readers

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
Batches = Sequence[tuple[int, bytes]]

_SERVER, _CLIENTS = "server.key_secret", "clients"
_MOST_QUESTION = 1024
"""Bytes of a frame that a subscriber sends, of a handshake too; the connection of one that sends a longer one is closed."""
_MOST_WAITING = 256
"""Subscribers whose questions wait; further questions are dropped."""
_MOST_AT_ONCE = 8
"""Subscribers that are answered at a time."""
_SLICE = 64
"""Messages in a piece of work."""
_REST = 4.0
"""How long the thread rests after a piece of work, in times that it took: it has a fifth of a core at most."""
_BLOCKED_SECONDS = 0.005
_MOST_BLOCKED_SECONDS = 1.0
"""After which a subscriber that reads nothing of its answer gives its place to one that waits."""


class Subscribers:
    """Who may subscribe to KV events: those whose public keys are in a folder (CURVE), or without one whoever reaches the port.

    Args:
        context: The sockets'.
        keys: A folder with ``server.key_secret`` and, in ``clients``, the public keys (``NAME.key``), as
            ``zmq.auth.create_certificates`` makes them; None: no keys are asked for.

    Raises:
        ConfigError: The folder lacks something.
    """

    def __init__(self, context: Any, keys: Path | None) -> None:
        self._pair: tuple[bytes, bytes] | None = None
        self._authenticator: Any = None
        if keys is None:
            return
        if not zmq.has("curve"):
            raise ConfigError("--kv-events key_folder: ZeroMQ is built without CURVE here")
        try:
            public, secret = zmq.auth.load_certificate(keys / _SERVER)
            clients = zmq.auth.load_certificates(keys / _CLIENTS)
            warn_of_readers(keys / _SERVER, "--kv-events key_folder")
        except (OSError, ValueError) as error:
            raise ConfigError(f"--kv-events key_folder: {keys}: {error}") from error
        if secret is None or not clients:
            raise ConfigError(f"--kv-events key_folder: {keys} needs {_SERVER} and public keys in {_CLIENTS}")
        self._pair = public, secret
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve(domain="*", location=str(keys / _CLIENTS))

    def guard(self, socket: Any) -> None:
        """Has a socket ask for keys, before it is bound."""
        socket.setsockopt(zmq.MAXMSGSIZE, _MOST_QUESTION)
        socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
        if self._pair is not None:
            socket.curve_server = True
            socket.curve_publickey, socket.curve_secretkey = self._pair

    def close(self) -> None:
        """Ends the thread that looks at keys."""
        if self._authenticator is not None:
            self._authenticator.stop()


class ReplayServer:
    """A bound ROUTER socket and the thread that answers on it. Life cycle: construct, :meth:`start`, :meth:`close`.

    An 8-byte big-endian number asks for all batches from that one on. A subscriber that asks again before it is answered is
    answered once more, for its last question only.

    Args:
        router: The socket; the thread's alone from now on.
        kept: Gives the batches that are kept now.
        topic: Begins each answer, as frames.
    """

    def __init__(self, router: Any, kept: Callable[[], Batches], topic: tuple[bytes, ...]) -> None:
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # it would drop what a slow subscriber has no room for
        self._router, self._kept, self._topic = router, kept, topic
        self._waiting: dict[bytes, int] = {}
        self._running: dict[bytes, Iterator[tuple[bytes, ...]]] = {}
        self._unsent: dict[bytes, tuple[bytes, ...]] = {}
        self._blocked: dict[bytes, float] = {}
        """Subscribers that are being answered and read nothing -> since when."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-event-replay", daemon=True)

    def start(self) -> None:
        """Begins to answer."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and closes the socket."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._router.close(0)

    def _run(self) -> None:
        while not self._stopping.is_set():
            asked = self._router.poll(0 if self._running else 100)
            began = time.monotonic()
            if asked:
                self._take_questions()
            went_on = self._answer()
            spent = time.monotonic() - began
            self._stopping.wait(max(_REST * spent, 0.0 if went_on or not self._running else _BLOCKED_SECONDS))

    def _take_questions(self) -> None:
        with suppress(zmq.Again):
            for _ in range(_SLICE):
                client, question = self._router.recv(zmq.NOBLOCK), b""
                while self._router.rcvmore:
                    question = self._router.recv()
                if len(question) == 8 and (client in self._waiting or len(self._waiting) < _MOST_WAITING):
                    self._waiting[client] = int.from_bytes(question, "big")

    def _answer(self) -> bool:
        """Sends a slice to each subscriber that is being answered; says whether anything was sent."""
        if self._waiting and len(self._running) >= _MOST_AT_ONCE:
            self._make_room(time.monotonic() - _MOST_BLOCKED_SECONDS)
        for client in list(self._waiting):
            if len(self._running) < _MOST_AT_ONCE and client not in self._running:
                self._running[client] = self._messages(client, self._waiting.pop(client))
        sent = [self._go_on(client) for client in list(self._running)]
        return any(sent)

    def _make_room(self, before: float) -> None:
        """Has those that read nothing since ``before`` wait again, for the rest of their answers; where many wait, for none."""
        for client in [each for each, since in self._blocked.items() if since <= before]:
            del self._running[client], self._blocked[client]
            *_, number, _ = self._unsent.pop(client)
            if len(self._waiting) < _MOST_WAITING // 2:
                self._waiting.setdefault(client, int.from_bytes(number, "big"))

    def _go_on(self, client: bytes) -> bool:
        """Sends the next messages to one subscriber; says whether it took any."""
        messages, sent = self._running[client], False
        for _ in range(_SLICE):
            message = self._unsent.pop(client, None) or next(messages, None)
            if message is None:
                del self._running[client]
                break
            try:
                self._router.send_multipart(message, zmq.NOBLOCK)
                sent = True
                self._blocked.pop(client, None)
            except zmq.Again:
                self._unsent[client] = message
                self._blocked.setdefault(client, time.monotonic())
                break
            except zmq.ZMQError:  # it has left
                del self._running[client]
                self._blocked.pop(client, None)
                break
        return sent

    def _messages(self, client: bytes, first: int) -> Iterator[tuple[bytes, ...]]:
        for seq, payload in self._kept():
            if seq >= first:
                yield (client, b"", *self._topic, seq.to_bytes(8, "big"), payload)
        yield (client, b"", *(b"" for _ in self._topic), END_OF_REPLAY, b"")
