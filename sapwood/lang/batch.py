"""Many rows: bounded concurrency, a progress bar, and a journal that survives the process.

The journal is a file of JSON lines: first what it is of, then a line for each row that has ended, written before the row counts
as done. A line is whole or, after a crash, the last and cut off: then it is dropped and its row runs again. So no row is lost,
and none is there twice. One process holds the file at a time.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from sapwood.lang.backends.base import Usage
from sapwood.lang.errors import ProgramError
from sapwood.lang.interpreter import Event, Record
from sapwood.lang.state import State

_VERSION = 1


@dataclass(frozen=True, slots=True)
class Row:
    """A row: its place and its arguments."""

    index: int
    arguments: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Tells rows apart by their arguments."""
        return hashlib.sha256(json.dumps(self.arguments, sort_keys=True, default=repr).encode()).hexdigest()[:16]


class Finished:
    """In the place of an interpreter: a run that a journal has."""

    loop = None
    finished = idle = True

    def __init__(self, entry: Mapping[str, Any]) -> None:
        self.text: str = entry["text"]
        self.messages, self.variables, self.meta = entry["messages"], entry["variables"], entry["meta"]
        self.returned = entry["returned"]
        self.kinds: dict[str, str] = entry.get("kinds", {})
        why = entry["error"]
        self.error = None if why is None else ProgramError(why["node"], why["line"], why["reason"])
        self.record = Record(events=[Event(**{**each, "usage": Usage(**each["usage"])}) for each in entry["events"]])
        self.record.parents |= {int(child): parent for child, parent in entry["parents"].items()}

    def pending(self, name: str) -> bool:
        """Nothing is."""
        return False

    async def get(self, name: str) -> Any:
        """A variable."""
        return self.variables[name]

    async def drained(self) -> None:
        """Returns, or raises why the run ended."""
        if self.error is not None:
            raise self.error


class Journal:
    """The file.

    Args:
        path: Where it is; made if it is not there.
        program: Whose it is.
        options: The run's sampling options.

    Raises:
        ValueError: It is another program's, or was made with other options, or another process has it.
    """

    def __init__(self, path: str | Path, program: str, options: Mapping[str, Any]) -> None:
        self._path = Path(path)
        self._file: IO[bytes] = self._path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ValueError(f"journal: another process is writing {self._path}") from None
        head = {"journal": _VERSION, "program": program, "options": json.loads(json.dumps(options, default=repr))}
        self._file.seek(0)
        whole = self._file.read()
        lines = whole[: whole.rfind(b"\n") + 1].splitlines()
        self._file.truncate(sum(len(line) + 1 for line in lines))  # a line that was cut off is dropped
        try:
            found = [json.loads(line) for line in lines]
        except ValueError:
            self.close()
            raise ValueError(f"journal: {self._path} is none") from None
        if found and found[0] != head:
            self.close()
            raise ValueError(f"journal: {self._path} is of {found[0].get('program')!r} or of other options")
        self.entries: dict[int, dict[str, Any]] = {each["row"]: each for each in found[1:]}
        if not found:
            self._write(head)

    def check(self, rows: Sequence[Row]) -> None:
        """Raises ValueError if what it has is of other rows."""
        for index, entry in self.entries.items():
            if index >= len(rows) or rows[index].key != entry["key"]:
                raise ValueError(f"journal: row {index} of {self._path} had other arguments")

    def add(self, row: Row, state: State) -> None:
        """Notes a row that has ended. Raises TypeError that names the value if one of it is not JSON."""
        run = state._executor
        error = run.error
        for name, value in (*run.variables.items(), ("what the program returns", run.returned)):
            try:
                json.dumps(value)
            except (TypeError, ValueError) as why:
                raise TypeError(f"row {row.index}: the journal cannot hold {name!r}: {why}") from None
        self._write(
            {
                "row": row.index,
                "key": row.key,
                "text": run.text,
                "messages": run.messages,
                "variables": run.variables,
                "kinds": run.kinds,
                "meta": run.meta,
                "returned": run.returned,
                "error": None if error is None else {"node": error.node, "line": error.line, "reason": error.reason},
                "events": [asdict(each) for each in run.record.events],
                "parents": run.record.parents,
            }
        )

    def _write(self, entry: Mapping[str, Any]) -> None:
        line = json.dumps(entry, ensure_ascii=False).encode() + b"\n"
        self._file.write(line)
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Lets go of the file."""
        self._file.close()


class _Bar:
    """A line on the error output."""

    def __init__(self, total: int, done: int, shown: bool) -> None:
        self._total, self._done, self._shown = total, done, shown
        self._first, self._began, self._last = done, time.monotonic(), 0.0

    def step(self, rows: int = 1) -> None:
        """So many more rows are done."""
        self._done += rows
        now = time.monotonic()
        if not self._shown or (now - self._last < 0.1 and self._done < self._total):
            return
        self._last = now
        rate = (self._done - self._first) / max(1e-9, now - self._began)
        filled = 30 * self._done // max(1, self._total)
        bar = "#" * filled + "." * (30 - filled)
        end = "\n" if self._done == self._total else ""
        print(f"\r[{bar}] {self._done}/{self._total} rows, {rate:.1f} a second", end=end, file=sys.stderr, flush=True)


class Batch:
    """Runs rows.

    Args:
        program: The program's name.
        begin: Makes a state.
        run: Runs a row on it.
        concurrency: So many at a time.
        progress_bar: Whether there is one.
        journal: Where finished rows are kept; None: nowhere.
        errors: ``raise`` or ``return``.
    """

    def __init__(
        self,
        program: str,
        begin: Callable[[], State],
        run: Callable[[Row, State], Awaitable[None]],
        concurrency: int,
        progress_bar: bool,
        journal: str | Path | None,
        errors: str,
    ) -> None:
        self._program, self._begin, self._run_row = program, begin, run
        self._concurrency, self._progress_bar = concurrency, progress_bar
        self._journal_path, self._errors = journal, errors

    async def run(self, rows: Sequence[Row], options: Mapping[str, Any]) -> list[State]:
        """The states of all rows, in order."""
        journal = None if self._journal_path is None else Journal(self._journal_path, self._program, options)
        try:
            states: dict[int, State] = {}
            if journal is not None:
                journal.check(rows)
                states = {
                    index: State(Finished(entry))
                    for index, entry in journal.entries.items()
                    if entry["error"] is None or self._errors == "return"
                }
            bar = _Bar(len(rows), len(states), self._progress_bar)
            bar.step(0)
            todo = iter([row for row in rows if row.index not in states])

            async def work() -> None:
                for row in todo:  # workers share it
                    states[row.index] = await self._one(row, journal)
                    bar.step()

            tasks = [asyncio.create_task(work()) for _ in range(min(self._concurrency, len(rows)))]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            return [states[row.index] for row in rows]
        finally:
            if journal is not None:
                journal.close()

    async def _one(self, row: Row, journal: Journal | None) -> State:
        state = self._begin()
        try:
            await self._run_row(row, state)
        except Exception as error:
            if self._errors == "raise":
                error.add_note(f"row {row.index}")
                if isinstance(error, ProgramError):
                    error.args = (f"row {row.index}: {error}",)
                raise
        if journal is not None:
            journal.add(row, state)
        return state
