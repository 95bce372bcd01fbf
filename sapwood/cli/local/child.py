"""One service as a child process: its log lines, the addresses it says it listens on, its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from sapwood_common.python_process import python_command, python_environment

_LISTENING = re.compile(r"\b(?:(\w+) )?listening on (?:https?://)?(\S+:\d+)")
_LAST_LINES = 20
_LONGEST_LINE = 1 << 16
_END_SECONDS = 0.01


class Child:
    """A running service. Made by :meth:`start`.

    Attributes:
        name: Its name in messages, such as ``worker-0``.
        last_lines: The last lines that it wrote.
        exited: Set once it has ended and all its output has been read.
    """

    def __init__(
        self,
        name: str,
        process: subprocess.Popen[bytes],
        output: asyncio.StreamReader,
        on_line: Callable[[str, str], None],
        reworded: Callable[[str], str],
    ) -> None:
        self.name = name
        self.last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self.exited = asyncio.Event()
        self._process = process
        self._output = output
        self._on_line = on_line
        self._reworded = reworded
        self._addresses: dict[str, str] = {}
        self._changed = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(
        cls,
        name: str,
        module: str,
        flags: Sequence[str],
        on_line: Callable[[str, str], None],
        reworded: Callable[[str], str] = str,
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """Starts ``python -m module flags`` in a process group of its own, tied to this process.

        Args:
            name: Its name in messages.
            module: The service's package.
            flags: Its command line.
            on_line: Called with name and text of each line it writes; must not raise.
            reworded: Changes each line before it is shown and kept.
            environment: Variables besides those of this process.
        """
        process = _start(python_command("-m", "sapwood.cli.local.tied", module, *flags), environment or {})
        output = asyncio.StreamReader(limit=_LONGEST_LINE)
        try:
            await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(output), process.stdout
            )
        except BaseException:
            process.kill()
            raise
        return cls(name, process, output, on_line, reworded)

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.returncode

    async def address(self, kind: str = "") -> str | None:
        """The address from its log line ``KIND listening on HOST:PORT``; None if it ended without saying so.

        Args:
            kind: Such as ``gRPC`` or ``HTTP``; empty where the line names none.
        """
        while True:
            found = self._addresses.get(kind.lower())
            if found is not None or self.exited.is_set():
                return found
            self._changed.clear()
            await self._changed.wait()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the service's main process, which passes it on as it sees fit."""
        self._process.send_signal(number)  # nothing happens after its end

    def kill(self) -> None:
        """Ends its whole process group at once; after its end, the children that it may have left behind."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _read(self) -> None:
        try:
            while True:
                try:
                    raw = await self._output.readline()
                except ValueError:  # the line is too long; the rest of it comes as further lines
                    continue
                if not raw:
                    break
                self._take(raw.decode(errors="replace").rstrip())
        finally:
            while self._process.poll() is None:  # noqa: ASYNC110 - it has closed its output: it is about to end
                await asyncio.sleep(_END_SECONDS)
            self.exited.set()
            self._changed.set()

    def _take(self, written: str) -> None:
        line = self._reworded(written)
        self.last_lines.append(line)
        found = _LISTENING.search(line)
        if found is not None:
            self._addresses.setdefault((found[1] or "").lower(), found[2])
            self._changed.set()
        self._on_line(self.name, line)


def _start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts a process. Not asyncio's own way: it asks the program's event loop policy, and uvloop's knows no children."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=python_environment({"PYTHONUNBUFFERED": "1", **environment}),
        start_new_session=True,  # the terminal's Ctrl-C is for the parent, which then stops the services in order
    )
