"""Child processes that answer questions and may be ended while they do: for work that a stranger's text decides.

A grammar, a template or an expression of a tokenizer is a program that a stranger wrote, so the bounds of the library that runs
it are not relied on. Each question has a process to itself. At its deadline, or when no caller waits for the answer any more,
the process is killed, and the next question gets a new one. The operating system bounds the memory of a process.

Fair places. Callers are distinguished by a name, such as a tenant's cache salt. A few places are shared in slices of time: the
next turn is for the caller who has used the least time of those that wait. A question that needs more than a slice while others
wait is paused (SIGSTOP) and has its next slice later. So a caller with many long questions delays another caller's first question
by about one slice. A caller's own turns go in alternation to a question that is new and to the one of his that has run longest,
so that long ones end one after the other. Where as many are paused as may be, a further long one is ended, and begins again when
there is room. Choosing a turn is O(callers that wait and paused questions of one).

Kills. To kill a process costs the start of another one, which takes longer than most answers. A caller whose questions had
several killed lately (it gave them up, or they did not end) has one place less than there are. While only one process is ready
its questions get new ones: so others find a place and a process.

Invariants: ``_free`` places + tickets with a place = ``size``; a ticket has a place, or is in a queue of its line, or has just
been given up; a process is idle, or belongs to one ticket.

The process: ``python -P -m MODULE``, whose ``main`` calls :func:`serve_parent`. Frames on its standard input, a socket: 4 bytes
length, big-endian, then the bytes. The first frame holds the settings and is answered by a greeting, each later one by an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from sapwood_common.errors import InternalError, ResourceExhaustedError
from sapwood_common.python_process import python_command, python_environment

Answer = Callable[[bytes], bytes]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_READ_BYTES = 256 * 1024
_START_SECONDS = 60.0
_LOW_PRIORITY = 10
_KILLS, _KILL_SECONDS, _MOST_KILLERS = 3, 5.0, 4096
"""Killed processes from which a caller counts as one that kills; seconds in which one of them is forgotten; callers known."""
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
        warm: Whether a process is started as soon as one was ended, not when it is needed.
    """

    size: int = 2
    most_paused: int = 4
    max_queued: int = 256
    slice_seconds: float = 0.25
    memory_bytes: int = 1 << 30
    cpu_seconds: int = 0
    warm: bool = False


class _Child:
    """A process and the socket to it. Lives on one event loop."""

    def __init__(self, module: str, settings: bytes) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                python_command("-m", module), stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=python_environment()
            )
        self.slow = False
        self._cpu_before = 0.0
        self.is_dead = False
        self._to_send = _frame(settings)
        self._received = bytearray()
        self.greeted = False
        self._answer: asyncio.Future[bytes] | None = None
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once it has started, or ended."""
        self._socket.setblocking(False)
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._read)
        self._reading = True

    def cpu_seconds(self) -> float:
        """CPU time of the process since it was asked."""
        try:
            return time.clock_gettime(_cpu_clock(self.process.pid)) - self._cpu_before
        except OSError:  # it has ended, or the system counts otherwise
            return 0.0

    async def ask(self, question: bytes) -> asyncio.Future[bytes]:
        """Sends a question; the future has the answer, or raises ChildDiedError."""
        self._cpu_before = 0.0
        self._cpu_before = self.cpu_seconds() if self.greeted else 0.0
        self._answer = answer = asyncio.get_running_loop().create_future()
        await self._send(_frame(question))
        return answer

    async def greet(self) -> bytes:
        """The greeting, if nothing was asked yet. Raises ChildDiedError if the process ends before."""
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answer = answer
        self.greeted = True
        await self._send(b"")
        return await answer

    async def _send(self, frames: bytes) -> None:
        loop = asyncio.get_running_loop()
        frames, self._to_send = self._to_send + frames, b""
        try:
            sent = self._socket.send(frames)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._died()
            return
        if sent < len(frames):
            try:
                await loop.sock_sendall(self._socket, memoryview(frames)[sent:])
            except OSError:
                self._died()

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def lower(self) -> None:
        """Gives it less of the CPU than others from now on; it cannot be raised again, so it is not used for another question."""
        self.slow = True
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self.process.pid, _LOW_PRIORITY)

    def end(self) -> None:
        """Kills it. It is gone a moment later."""
        if self._reading:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._reading = False
        self._socket.close()
        self.process.kill()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def _read(self) -> None:
        try:
            more = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            more = b""
        if not more:
            self._died()
            return
        self._received += more
        while (frame := self._next_frame()) is not None:
            if not self.greeted:
                self.greeted = True
                self._cpu_before = 0.0
                self._cpu_before = self.cpu_seconds()
                if not self.ready.done():
                    self.ready.set_result(None)
            elif self._answer is not None and not self._answer.done():
                self._answer.set_result(frame)

    def _died(self) -> None:
        self.is_dead = True
        if not self.ready.done():
            self.ready.set_result(None)
        if self._reading:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._reading = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ChildDiedError())
            self._answer.exception()  # marked as seen: its caller may be gone

    def _next_frame(self) -> bytes | None:
        if len(self._received) < 4:
            return None
        end = 4 + int.from_bytes(self._received[:4], "big")
        if len(self._received) < end:
            return None
        frame = bytes(memoryview(self._received)[4:end])
        del self._received[:end]
        return frame


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
    of_killer: bool = False
    """Whether its place counts as one of callers that kill."""


@dataclass(eq=False, slots=True)
class _Line:
    """A caller's questions."""

    used: float
    """Seconds that its questions ran, on the scale of the other lines."""
    kills: bool
    """Whether several processes were killed over its questions lately."""
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
        self._dying: list[subprocess.Popen[bytes]] = []
        self._killers: dict[str, tuple[float, float]] = {}
        """Caller -> processes killed over its questions, and when that was counted; the oldest first."""
        self._places_of_killers = 0
        self._closed = False
        self._started = False
        """Whether a process was seen to start; else one after another might die of the settings."""

    async def start(self) -> bytes:
        """Starts a process and returns its greeting.

        Raises:
            ChildDiedError: The process died of the settings.
            TimeoutError: It took a minute over them.
        """
        child = _Child(self._module, self._settings)
        self._busy.add(child)
        greeted = False
        try:
            async with asyncio.timeout(_START_SECONDS):
                greeting = await child.greet()
            greeted = self._started = True
            return greeting
        finally:
            self._give_back(child, reusable=greeted)

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
            if self._free and not self._waiting and self._may_hold(line):
                self._hold(ticket)
            else:
                self._make_room(ticket)
                await self._turn(ticket, line.new, began, deadline)
            while True:
                start = ticket.progress.running_since = loop.time()
                if child is None:
                    child = self._take(line)
                    answer = await child.ask(question)
                    if not child.greeted:  # it starts, for which the question is not to blame
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
                if not answered:
                    self._killed(caller, line)
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
        for child in (*self._idle, *self._busy):
            child.process.kill()
        for child in self._idle:
            child.end()
            self._dying.append(child.process)
        self._idle.clear()
        for child in tuple(self._busy):
            self._dying.append(child.process)
        for process in self._dying:
            process.wait()
        self._dying.clear()

    def _line_of(self, caller: str) -> _Line:
        line = self._lines.get(caller)
        if line is None:
            least = min((other.used for other in self._lines.values()), default=0.0)
            line = self._lines[caller] = _Line(least, self._kills(caller) >= _KILLS)
        return line

    def _kills(self, caller: str) -> float:
        """Processes killed over a caller's questions; one is forgotten each few seconds."""
        count, counted = self._killers.get(caller, (0.0, 0.0))
        return max(0.0, count - (asyncio.get_running_loop().time() - counted) / _KILL_SECONDS)

    def _killed(self, caller: str, line: _Line) -> None:
        count = self._kills(caller) + 1
        self._killers.pop(caller, None)
        self._killers[caller] = min(count, 2.0 * _KILLS), asyncio.get_running_loop().time()
        line.kills = count >= _KILLS
        if len(self._killers) > _MOST_KILLERS:
            del self._killers[next(iter(self._killers))]

    def _may_hold(self, line: _Line) -> bool:
        """Whether a question of a line may have one more place."""
        return not line.kills or self._places_of_killers < max(1, self._limits.size - 1)

    def _hold(self, ticket: _Ticket) -> None:
        """Gives a ticket a place."""
        self._free -= 1
        ticket.has_place, ticket.of_killer = True, ticket.line.kills
        self._places_of_killers += ticket.of_killer

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
        return bool(line.new or line.paused or (line.again and self._may_pause(line))) and self._may_hold(line)

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
        self._places_of_killers -= ticket.of_killer
        self._free += 1

    def _take(self, line: _Line) -> _Child:
        if self._closed:
            raise InternalError("the pool of processes is closed")
        child = next((one for one in self._idle if one.greeted), None) or next(iter(self._idle), None)
        if line.kills and len(self._idle) < 2 and self._limits.size > 1:
            child = None
        if child is None:
            child = _Child(self._module, self._settings)
        else:
            self._idle.remove(child)
        if child.is_dead:
            self._give_back(child, reusable=False)
            return self._take(line)
        self._busy.add(child)
        return child

    def _give_back(self, child: _Child, *, reusable: bool) -> None:
        self._busy.discard(child)
        if reusable and not self._closed and len(self._idle) < self._limits.size:
            self._idle.append(child)
            return
        child.end()
        self._dying = [process for process in self._dying if process.poll() is None]
        if child.process.poll() is None:
            self._dying.append(child.process)
            asyncio.get_running_loop().call_later(0.1, child.process.poll)
        if self._limits.warm and not self._closed and not self._idle and self._started:
            self._idle.append(_Child(self._module, self._settings))


def _cpu_clock(pid: int) -> int:
    """The id of the clock of a process's CPU time, as Linux makes it of the process id (clock_getcpuclockid)."""
    return (~pid << 3) | 2


def _frame(content: bytes) -> bytes:
    return len(content).to_bytes(4, "big") + content


def serve_parent(make: Callable[[bytes], tuple[bytes, Answer]], stack_bytes: int = 0) -> int:
    """Runs in the process: answers until the parent has gone.

    Args:
        make: Takes the settings; returns the greeting, and what answers questions.
        stack_bytes: The size of the stack that both run on, for work that recurses deep; 0: the usual one.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the parent, which then closes the socket
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:  # noqa: PTH123
            file.write("900")  # where memory runs out, this process goes first
    parent = socket.socket(fileno=os.dup(0))
    if not stack_bytes:
        _serve(parent, make)
        return 0
    threading.stack_size(stack_bytes)
    thread = threading.Thread(target=_serve, args=(parent, make))
    thread.start()
    thread.join()
    return 0


def _serve(parent: socket.socket, make: Callable[[bytes], tuple[bytes, Answer]]) -> None:
    settings = _read(parent)
    if settings is None:
        return
    memory, cpu_seconds = (int.from_bytes(settings[at : at + 8], "big") for at in (0, 8))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _bound_memory(memory)  # the settings may be a stranger's, too
    greeting, answer = make(settings[16:])
    _bound_memory(memory)
    parent.sendall(_frame(greeting))
    while (question := _read(parent)) is not None:
        if cpu_seconds:
            used = resource.getrusage(resource.RUSAGE_SELF)
            end = int(used.ru_utime + used.ru_stime) + cpu_seconds + 1
            resource.setrlimit(resource.RLIMIT_CPU, (end, resource.RLIM_INFINITY))
        parent.sendall(_frame(answer(question)))


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
