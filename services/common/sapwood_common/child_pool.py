"""Child processes that answer questions and may be ended while they do: for work that a stranger's text decides.

A grammar, a template or an expression of a tokenizer is a program that a stranger wrote, so the bounds of the library that runs
it are not relied on. Each question has a process to itself. At its deadline, or when no caller waits for the answer any more,
the process is killed, and the next question gets a new one. The operating system bounds the memory of a process.

Starts. A fork server, ``python -P -m MODULE``, has imported the module and read the settings once; each process is a fork of it.
So a process costs some milliseconds; a start of Python would hold its place, and a core, for half a second. A caller whose
processes are killed therefore does not slow the questions of others.

Fair places. Callers are distinguished by a name, such as a tenant's cache salt. A few places are shared in slices of time: the
next turn is for the caller who has used the least time of those that wait. A question that needs more than a slice while others
wait is paused (SIGSTOP) and has its next slice later. So a caller with many long questions delays another caller's first question
by about one slice. A caller's own turns go in alternation to a question that is new and to the one of his that has run longest,
so that long ones end one after the other. Where as many are paused as may be, a further long one is ended, and begins again when
there is room. Choosing a turn is O(callers that wait and paused questions of one).

Invariants: ``_free`` places + tickets with a place = ``size``; a ticket has a place, or is in a queue of its line, or has just
been given up; a process is idle, or belongs to one ticket. The fork server waits for a dead process only once its parent has
said so, hence no signal reaches another process that has got the number. Once its socket is closed it kills the rest, waits for
all and ends: no process is left to the system's first one, which in a container may wait for none.

Messages. ``main`` of the module calls :func:`serve_parent`. The fork server's standard input is a socket. Its parent sends one
byte and a number of 8 bytes: ``s`` (with a file that holds the settings), ``f`` (with a socket: fork a process that answers on
it), ``r`` (a process has been killed). It answers frames (4 bytes length, big-endian, then the bytes): the greeting, then the
number of each process. Questions and answers are frames on the process's own socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, NoReturn

from sapwood_common.errors import InternalError, ResourceExhaustedError
from sapwood_common.python_process import python_command, python_environment

Answer = Callable[[bytes], bytes]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_READ_BYTES = 256 * 1024
_START_SECONDS = 60.0
_LOW_PRIORITY = 10
_REAP_SECONDS = 0.05
"""Between two looks whether killed processes have ended."""
_LEAVE_SECONDS = 2.0
"""What a fork server may take over its end, before it is killed."""
_MOST_SLICES = 4
"""Slices after which a question is paused for others although it had little of the CPU."""


class ChildDiedError(Exception):
    """The process died of the question: mostly of its memory's bound, or of the depth of its stack."""


class TimeUpError(Exception):
    """The question was not answered in time.

    Attributes:
        ran: Seconds that its process ran.
        waited: Seconds that it waited for places.
    """

    def __init__(self, ran: float, waited: float) -> None:
        super().__init__(f"ran {ran:.3g} s, waited {waited:.3g} s")
        self.ran = ran
        self.waited = waited


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """What a pool may use.

    Attributes:
        size: Processes that run at a time.
        most_paused: Processes that are paused at a time.
        max_queued: Questions that wait; beyond that, the newest of the caller with most is refused.
        slice_seconds: How long a question runs before others have their turn.
        memory_bytes: Memory of a process besides what it has after its start.
        cpu_seconds: CPU time of a question, as a second bound where the parent cannot kill; 0: none.
    """

    size: int = 2
    most_paused: int = 4
    max_queued: int = 256
    slice_seconds: float = 0.25
    memory_bytes: int = 1 << 30
    cpu_seconds: int = 0


class _ForkServer:
    """The process that forks others, and the socket to it. Lives on one event loop."""

    def __init__(self, module: str, settings: bytes) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                python_command("-m", module), stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=python_environment()
            )
        self.is_dead = False
        self.greeting: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._forking: deque[_Child] = deque()
        """Those whose numbers are still to come, in order."""
        self._received = bytearray()
        self._socket.setblocking(False)
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._read)
        with _memory_file() as file:
            file.write(settings)
            file.seek(0)
            self._tell(b"s", len(settings), file.fileno())

    def fork(self, child: _Child, theirs: socket.socket) -> None:
        """Makes a process that answers on a socket, and gives ``child`` its number."""
        self._forking.append(child)
        self._tell(b"f", 0, theirs.fileno())

    def reap(self, pid: int) -> None:
        """Says that a process was killed."""
        self._tell(b"r", pid)

    def end(self) -> None:
        """Kills it, and with it what it has forked. Does not wait."""
        self._died()
        self._process.kill()

    def leave(self) -> None:
        """Closes the socket: it then kills what it has forked, waits for that, and goes. Does not wait."""
        self._died()

    def wait(self, seconds: float = 0.0) -> None:
        """Returns once it is gone. Kills it if it is still there after a time."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _tell(self, kind: bytes, number: int, *files: int) -> None:
        if self.is_dead:
            return
        try:
            socket.send_fds(self._socket, [kind + number.to_bytes(8, "big")], files)
        except OSError:  # also if it has not read thousands of messages
            self.end()

    def _read(self) -> None:
        if (more := _new_bytes(self._socket)) is None:
            return
        if not more:
            self._died()
            self._process.kill()
            return
        self._received += more
        while (frame := _next_frame(self._received)) is not None:
            if not self.greeting.done():
                self.greeting.set_result(frame)
            elif self._forking:
                self._forking.popleft().started(int.from_bytes(frame, "big"))

    def _died(self) -> None:
        if self.is_dead:
            return
        self.is_dead = True
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        if not self.greeting.done():
            self.greeting.set_exception(ChildDiedError())
            self.greeting.exception()  # marked as seen: mostly nobody waits for it
        while self._forking:
            self._forking.popleft().lost()


class _Child:
    """A process and the socket to it. Lives on one event loop."""

    def __init__(self, server: _ForkServer) -> None:
        self._server = server
        self._pid: int | None = None
        """None until it is known, and again once the process was killed."""
        self._ended = False
        self.slow = False
        self.is_dead = False
        self._cpu_before = 0.0
        self._received = bytearray()
        self._answer: asyncio.Future[bytes] | None = None
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once it has started, or ended."""
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._read)
        self._reading = True
        with theirs:
            server.fork(self, theirs)
        if server.is_dead:
            self._died()

    def started(self, pid: int) -> None:
        """Its number is known."""
        self._pid = pid
        if self._ended:
            self._kill()
        elif not self.ready.done():
            self.ready.set_result(None)

    def lost(self) -> None:
        """It was not made, for its fork server has ended."""
        if not self._ended:
            self._died()

    def cpu_seconds(self) -> float:
        """CPU time of the process since it was asked."""
        return self._cpu() - self._cpu_before

    def _cpu(self) -> float:
        if self._pid is None:
            return 0.0
        try:
            return time.clock_gettime(_cpu_clock(self._pid))
        except OSError:  # it has ended, or the system counts otherwise
            return 0.0

    async def ask(self, question: bytes) -> asyncio.Future[bytes]:
        """Sends a question; the future has the answer, or raises ChildDiedError."""
        self._cpu_before = self._cpu()
        self._answer = answer = asyncio.get_running_loop().create_future()
        if self.is_dead:
            self._died()
            return answer
        frame = _frame(question)
        try:
            sent = self._socket.send(frame)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._died()
            return answer
        if sent < len(frame):
            try:
                await asyncio.get_running_loop().sock_sendall(self._socket, memoryview(frame)[sent:])
            except OSError:
                self._died()
        return answer

    def pause(self) -> None:
        """Has it stand still."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Has it go on."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kills it; its question is answered with ChildDiedError."""
        self._signal(signal.SIGKILL)

    def lower(self) -> None:
        """Gives it less of the CPU than others from now on; it cannot be raised again, so it is not used for another question."""
        self.slow = True
        if self._pid is not None:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self._pid, _LOW_PRIORITY)

    def end(self) -> None:
        """Kills it. It is gone a moment later."""
        self._ended = True
        self._stop_reading()
        self._socket.close()
        self._kill()

    def _kill(self) -> None:
        pid = self._pid
        self._signal(signal.SIGKILL)
        self._pid = None
        if pid is not None:
            self._server.reap(pid)

    def _signal(self, number: signal.Signals) -> None:
        if self._pid is not None and not self._server.is_dead:  # else the number may be another's by now
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)

    def _read(self) -> None:
        if (more := _new_bytes(self._socket)) is None:
            return
        if not more:
            self._died()
            return
        self._received += more
        while (frame := _next_frame(self._received)) is not None:
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(frame)

    def _died(self) -> None:
        self.is_dead = True
        if not self.ready.done():
            self.ready.set_result(None)
        self._stop_reading()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ChildDiedError())
            self._answer.exception()  # marked as seen: its caller may be gone

    def _stop_reading(self) -> None:
        if self._reading:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._reading = False


@dataclass(slots=True)
class Progress:
    """How long a question has run, on the event loop's clock."""

    ran: float = 0.0
    running_since: float | None = None

    def seconds(self, now: float) -> float:
        """Seconds that it has run until now."""
        return self.ran if self.running_since is None else self.ran + now - self.running_since

    def stop(self, now: float) -> float:
        """Counts what has run since it continued; returns that."""
        ran = 0.0 if self.running_since is None else now - self.running_since
        self.ran, self.running_since = self.ran + ran, None
        return ran


@dataclass(eq=False, slots=True)
class _Ticket:
    """A question under way."""

    line: _Line
    progress: Progress
    turn: asyncio.Future[None] | None = None
    """What a ticket in a queue waits for."""
    has_place: bool = False


@dataclass(eq=False, slots=True)
class _Line:
    """A caller's questions."""

    used: float
    """Seconds that its questions ran, on the scale of the other lines."""
    tickets: int = 0
    new: deque[_Ticket] = field(default_factory=deque)
    paused: deque[_Ticket] = field(default_factory=deque)
    again: deque[_Ticket] = field(default_factory=deque)
    """Questions that were ended after a slice, for want of room."""
    last_was_new: bool = False


class ChildPool:
    """Asks processes questions. Lives on one event loop.

    Args:
        module: The module that a process runs.
        settings: The first frame to each.
        limits: The resource limits of the pool.
        too_many: The error's text where too many questions wait.
    """

    def __init__(self, module: str, settings: bytes, limits: PoolLimits, too_many: str) -> None:
        self._module = module
        bounds = limits.memory_bytes.to_bytes(8, "big") + limits.cpu_seconds.to_bytes(8, "big")
        self._settings = bounds + settings
        self._limits = limits
        self._too_many = too_many
        self._free = limits.size
        self._lines: dict[str, _Line] = {}
        self._waiting = 0
        self._idle: list[_Child] = []
        self._busy: set[_Child] = set()
        self._server: _ForkServer | None = None
        self._closed = False

    async def start(self) -> bytes:
        """Starts the fork server and returns its greeting.

        Raises:
            ChildDiedError: It died of the settings.
            TimeoutError: It took a minute over them.
        """
        async with asyncio.timeout(_START_SECONDS):
            return await asyncio.shield(self._fork_server().greeting)

    async def ask(
        self, question: bytes, caller: str = "", timeout: float | None = None, progress: Progress | None = None
    ) -> bytes:
        """The answer. Cancelling the call kills the process.

        Args:
            question: The question for the process.
            caller: Whose question it is.
            timeout: Seconds that it may take, the wait for places included.
            progress: Filled in meanwhile.

        Raises:
            TimeUpError: It took longer.
            ChildDiedError: The process died of it.
            ResourceExhaustedError: Too many questions wait.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        deadline = None if timeout is None else began + timeout
        line = self._line_of(caller)
        line.tickets += 1
        ticket = _Ticket(line, progress or Progress())
        child: _Child | None = None
        answered = False
        try:
            if self._free and not self._waiting:
                self._hold(ticket)
            else:
                self._make_room(ticket)
                await self._turn(ticket, line.new, began, deadline)
            while True:
                start = ticket.progress.running_since = loop.time()
                if child is None:
                    child = self._take()
                    answer = await child.ask(question)
                    if not child.ready.done():  # it starts, for which the question is not to blame
                        await asyncio.wait((child.ready, answer), return_when=asyncio.FIRST_COMPLETED)
                        starting = loop.time() - start
                        start += starting
                        deadline = None if deadline is None else deadline + starting
                else:
                    child.resume()
                await self._slice(child, answer, ticket, start, deadline)
                now = loop.time()
                line.used += ticket.progress.stop(now)
                if answer.done():
                    content = answer.result()
                    answered = True
                    return content
                if deadline is not None and now >= deadline:
                    raise TimeUpError(ticket.progress.ran, now - began - ticket.progress.ran)
                if self._may_pause(line):
                    child.pause()
                    queue = line.paused
                else:
                    self._give_back(child, reusable=False)
                    child, queue = None, line.again
                self._release(ticket)
                await self._turn(ticket, queue, began, deadline)
        finally:
            line.used += ticket.progress.stop(loop.time())
            if child is not None:
                self._give_back(child, reusable=answered and not child.slow)
            if ticket.has_place:
                self._release(ticket)
            line.tickets -= 1
            if not line.tickets:
                self._lines.pop(caller, None)
            self._give_turns()

    async def close(self) -> None:
        """Ends all processes, and with them the questions that are under way."""
        self._closed = True
        for child in self._busy:
            child.kill()
        for child in self._idle:
            child.end()
        self._idle.clear()
        if self._server is not None:
            self._server.leave()
            await asyncio.to_thread(self._server.wait, _LEAVE_SECONDS)

    def _line_of(self, caller: str) -> _Line:
        line = self._lines.get(caller)
        if line is None:
            least = min((other.used for other in self._lines.values()), default=0.0)
            line = self._lines[caller] = _Line(least)
        return line

    def _hold(self, ticket: _Ticket) -> None:
        """Gives a ticket a place."""
        self._free -= 1
        ticket.has_place = True

    def _make_room(self, ticket: _Ticket) -> None:
        """Refuses the newest question of the caller with most, if too many wait."""
        if self._waiting < self._limits.max_queued:
            return
        fullest = max(self._lines.values(), key=lambda line: len(line.new))
        if len(fullest.new) <= len(ticket.line.new) + 1:
            raise ResourceExhaustedError(self._too_many, retry_after=1.0)
        self._refuse(fullest.new, fullest.new[-1])

    async def _slice(
        self, child: _Child, answer: asyncio.Future[bytes], ticket: _Ticket, start: float, deadline: float | None
    ) -> None:
        """Lets a child run until it has answered, its time is up, or its slices are over and others wait for its place."""
        loop = asyncio.get_running_loop()
        last, cpu_before = start + _MOST_SLICES * self._limits.slice_seconds, child.cpu_seconds()
        while not answer.done():
            start += self._limits.slice_seconds
            until = start if deadline is None else min(start, deadline)
            await asyncio.wait((answer,), timeout=max(0.0, until - loop.time()))
            if answer.done() or (deadline is not None and loop.time() >= deadline):
                return
            if not child.slow and child.cpu_seconds() > self._limits.slice_seconds:
                child.lower()
            idle = child.cpu_seconds() - cpu_before < self._limits.slice_seconds / 2  # other programs had the CPU
            if (not idle or loop.time() >= last) and any(map(self._waits, self._lines.values())):
                return

    def _waits(self, line: _Line) -> bool:
        """Whether a line has a question that may have a place now."""
        return bool(line.new or line.paused or (line.again and self._may_pause(line)))

    def _may_pause(self, line: _Line) -> bool:
        """Whether one more question of a line may be paused."""
        share = max(1, self._limits.most_paused // len(self._lines))
        return (
            len(line.paused) < share and sum(len(one.paused) for one in self._lines.values()) < self._limits.most_paused
        )

    def _refuse(self, queue: deque[_Ticket], ticket: _Ticket) -> None:
        queue.remove(ticket)
        self._waiting -= 1
        assert ticket.turn is not None
        if not ticket.turn.done():
            ticket.turn.set_exception(ResourceExhaustedError(self._too_many, retry_after=1.0))

    async def _turn(self, ticket: _Ticket, queue: deque[_Ticket], began: float, deadline: float | None) -> None:
        """Waits in a queue for a place."""
        loop = asyncio.get_running_loop()
        ticket.turn = turn = loop.create_future()
        queue.append(ticket)
        self._waiting += 1
        self._give_turns()
        timeout = None if deadline is None else max(0.0, deadline - loop.time())
        try:
            if not turn.done():
                await asyncio.wait((turn,), timeout=timeout)
        finally:
            if not turn.done():
                queue.remove(ticket)
                self._waiting -= 1
        if not turn.done():
            raise TimeUpError(ticket.progress.ran, loop.time() - began - ticket.progress.ran)
        turn.result()

    def _give_turns(self) -> None:
        while self._free:
            line = min(filter(self._waits, self._lines.values()), key=lambda line: line.used, default=None)
            if line is None:
                return
            begun = line.paused or (line.again and self._may_pause(line))
            line.last_was_new = bool(line.new) and not (line.last_was_new and begun)
            if line.last_was_new:
                ticket = line.new.popleft()
            elif line.paused:
                ticket = max(line.paused, key=lambda one: one.progress.ran)
                line.paused.remove(ticket)
            else:
                ticket = line.again.popleft()
            self._waiting -= 1
            self._hold(ticket)
            assert ticket.turn is not None
            ticket.turn.set_result(None)

    def _release(self, ticket: _Ticket) -> None:
        """Gives up a place. The caller gives turns next."""
        ticket.has_place = False
        self._free += 1

    def _fork_server(self) -> _ForkServer:
        if self._closed:
            raise InternalError("the pool of processes is closed")
        if self._server is None or self._server.is_dead:
            if self._server is not None:
                self._server.wait()
            self._server = _ForkServer(self._module, self._settings)
        return self._server

    def _take(self) -> _Child:
        server = self._fork_server()
        while self._idle:
            child = self._idle.pop()
            if not child.is_dead:
                break
            child.end()
        else:
            child = _Child(server)
        self._busy.add(child)
        return child

    def _give_back(self, child: _Child, *, reusable: bool) -> None:
        self._busy.discard(child)
        if reusable and not self._closed and not child.is_dead and len(self._idle) < self._limits.size:
            self._idle.append(child)
        else:
            child.end()


def _cpu_clock(pid: int) -> int:
    """The id of the clock of a process's CPU time, as Linux makes it of the process id (clock_getcpuclockid)."""
    return (~pid << 3) | 2


def _frame(content: bytes) -> bytes:
    return len(content).to_bytes(4, "big") + content


def _new_bytes(connection: socket.socket) -> bytes | None:
    """What has come on a socket that does not wait; None: nothing yet; empty: it is closed or broken."""
    try:
        return connection.recv(_READ_BYTES)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _next_frame(received: bytearray) -> bytes | None:
    """Takes the next frame out of what has come; None: it is not there to its end."""
    if len(received) < 4:
        return None
    end = 4 + int.from_bytes(received[:4], "big")
    if len(received) < end:
        return None
    frame = bytes(memoryview(received)[4:end])
    del received[:end]
    return frame


def _memory_file() -> IO[bytes]:
    """A file without a name, in memory where the system has such."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("settings"), "w+b")  # noqa: PTH123
    return tempfile.TemporaryFile()


def serve_parent(make: Callable[[bytes], tuple[bytes, Answer]], stack_bytes: int = 0) -> int:
    """Runs in the fork server: forks processes until the parent has gone.

    Args:
        make: Takes the settings; returns the greeting, and what answers questions. It leaves no threads behind.
        stack_bytes: The size of the stack that questions are answered on, for work that recurses deep; 0: the usual one.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the parent, which then closes the socket
    _die_with_parent()
    parent = socket.socket(fileno=os.dup(0))
    kind, _, files = _message(parent)
    if kind != b"s":
        return 0
    with open(files[0], "rb") as file:  # noqa: PTH123
        settings = file.read()
    memory, cpu_seconds = (int.from_bytes(settings[at : at + 8], "big") for at in (0, 8))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _bound_memory(memory)  # the settings may be a stranger's, too
    greeting, answer = make(settings[16:])
    _bound_memory(memory)
    del settings
    gc.collect()
    gc.freeze()  # what all processes share stays shared
    _tell_parent(parent, greeting)
    running, killed = set[int](), set[int]()
    while True:
        if killed and not select.select((parent,), (), (), _REAP_SECONDS)[0]:
            killed = _not_ended(killed)
            continue
        kind, number, files = _message(parent)
        if not kind:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            for pid in running | killed:
                os.waitpid(pid, 0)
            return 0
        if kind == b"r":
            running.remove(number)
            killed = _not_ended(killed | {number})
            continue
        asked = socket.socket(fileno=files[0])
        pid = os.fork()
        if not pid:
            parent.close()
            _serve_questions(asked, answer, memory, cpu_seconds, stack_bytes)
        running.add(pid)
        asked.close()
        _tell_parent(parent, pid.to_bytes(8, "big"))


def _tell_parent(parent: socket.socket, content: bytes) -> None:
    with contextlib.suppress(OSError):  # it has gone, which the next message shows
        parent.sendall(_frame(content))


def _message(parent: socket.socket) -> tuple[bytes, int, list[int]]:
    """The next message of the parent; the first byte is empty if it has gone."""
    data, files = b"", list[int]()
    with contextlib.suppress(OSError):  # closed with something unread: as any end
        data, files, _, _ = socket.recv_fds(parent, 9, 1)
        while data and len(data) < 9:
            more = parent.recv(9 - len(data))
            if not more:
                return b"", 0, []
            data += more
    return data[:1], int.from_bytes(data[1:], "big"), files


def _not_ended(killed: set[int]) -> set[int]:
    """Those of killed processes that are still there."""
    return {pid for pid in killed if not os.waitpid(pid, os.WNOHANG)[0]}


def _serve_questions(asked: socket.socket, answer: Answer, memory: int, cpu_seconds: int, stack_bytes: int) -> NoReturn:
    """Runs in a process: answers until the parent closes the socket."""
    try:
        _die_with_parent()
        _bound_memory(memory)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:  # noqa: PTH123
            file.write("900")  # where memory runs out, this process goes first
        if stack_bytes:
            threading.stack_size(stack_bytes)
            thread = threading.Thread(target=_answer_all, args=(asked, answer, cpu_seconds))
            thread.start()
            thread.join()
        else:
            _answer_all(asked, answer, cpu_seconds)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)  # the rest of the module's main is the fork server's


def _answer_all(asked: socket.socket, answer: Answer, cpu_seconds: int) -> None:
    while (question := _read(asked)) is not None:
        if cpu_seconds:
            used = resource.getrusage(resource.RUSAGE_SELF)
            end = int(used.ru_utime + used.ru_stime) + cpu_seconds + 1
            resource.setrlimit(resource.RLIMIT_CPU, (end, resource.RLIM_INFINITY))
        asked.sendall(_frame(answer(question)))


def _die_with_parent() -> None:
    """Has the system kill this process when the one that started it has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _bound_memory(more: int) -> None:
    most = _memory_now() + more
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most if hard < 0 else min(most, hard), hard))


def _memory_now() -> int:
    """Bytes of address space that this process has mapped."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # not Linux, where the bound on the address space is not enforced either
        return 0


def _read(parent: socket.socket) -> bytes | None:
    header = _read_exactly(parent, 4)
    return None if header is None else _read_exactly(parent, int.from_bytes(header, "big"))


def _read_exactly(parent: socket.socket, size: int) -> bytes | None:
    content = bytearray(size)
    view, at = memoryview(content), 0
    while at < size:
        count = parent.recv_into(view[at:])
        if not count:
            return None
        at += count
    return bytes(content)
