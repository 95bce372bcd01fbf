"""Clusters that run on this machine: `sapwood up --detach`, `ps`, `stop` and `logs`.

Each `sapwood up` keeps a record under ``SAPWOOD_HOME/run``: a JSON file of its process number, which it locks for as long as it
runs. So a record whose lock is free belongs to a process that has ended in any way, and the next reader removes it.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from sapwood.cli.errors import EXIT_CODES, REFUSED, CliError
from sapwood.cli.terminal import one_line
from sapwood_common.python_process import python_command, python_environment

_LOG_VARIABLE = "SAPWOOD_UP_LOG"
"""Names the log of a detached cluster to the process that is it."""
_POLL_SECONDS = 0.1
_RECORD_BYTES = 4096


@dataclass(frozen=True)
class Running:
    """A cluster that runs.

    Attributes:
        pid: The process of `sapwood up`, which its signals go to.
        model: What clients call its model.
        http: The URL of its HTTP port; empty until it answers.
        grpc: Its gRPC host:port; empty until it answers.
        started: Seconds since 1970.
        log: The file that a detached one writes; empty: it writes to a terminal.
    """

    pid: int
    model: str
    http: str
    grpc: str
    started: float
    log: str


class Record:
    """This process's record, from construction to :meth:`close` or to the end of a ``with`` block. Where it cannot be written
    there is none.
    """

    def __init__(self, model: str) -> None:
        self._running = Running(os.getpid(), model, "", "", time.time(), os.environ.pop(_LOG_VARIABLE, ""))
        self._path = _folder() / f"{self._running.pid}.json"
        self._file: int | None = None
        unlocked = self._path.with_suffix(
            ".new"
        )  # gets its name when it is locked: before that it looks like one of the past
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._write()
            unlocked.replace(self._path)

    def answers(self, http: str, grpc: str) -> None:
        """Notes where the cluster answers."""
        self._running = Running(**{**asdict(self._running), "http": http, "grpc": grpc})
        self._write()

    def close(self) -> None:
        """Removes it."""
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # at once and of one length, so that nobody reads half of it
                os.pwrite(self._file, json.dumps(asdict(self._running)).ljust(_RECORD_BYTES).encode(), 0)


def running_clusters() -> list[Running]:
    """The clusters that run under this ``SAPWOOD_HOME``, oldest first; removes the records of those that have ended."""
    found = []
    for path in _folder().glob("*.json"):
        try:
            with path.open() as file:
                if _is_free(file.fileno()):
                    path.unlink(missing_ok=True)
                    continue
                found.append(Running(**json.load(file)))
        except (OSError, ValueError, TypeError):  # it has just ended, or is being written
            continue
    return sorted(found, key=lambda each: each.started)


def detach(words: Sequence[str]) -> int:
    """Starts `sapwood up` in the background, and returns once it answers; its output until then is shown.

    Args:
        words: The command line, without ``--detach``.

    Raises:
        CliError: It ended before it answered.
    """
    folder = _folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_old_logs(folder)
        log = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                python_command("-m", "sapwood.cli.main", *words),
                env=python_environment({_LOG_VARIABLE: str(log)}),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    except OSError as error:
        raise CliError(
            f"--detach: cannot write {folder}: {error.strerror} (SAPWOOD_HOME chooses another place)"
        ) from None
    try:
        with log.open() as shown:
            while True:
                ended = process.poll()
                ready = _find(process.pid)
                while line := shown.readline():
                    if not line.startswith("Ctrl-C stops it"):
                        print(line, end="", flush=True)
                if ended is not None:
                    raise CliError(f"it ended before it answered; all it wrote is in {log}", ended or 1)
                if ready is not None and ready.http:
                    print(
                        f"it runs in the background: `sapwood logs` shows what it writes ({log}), `sapwood stop` ends it"
                    )
                    return 0
                time.sleep(_POLL_SECONDS)
    except KeyboardInterrupt:
        process.send_signal(signal.SIGTERM)
        process.wait()
        raise


def configure(verbs: Any) -> None:
    """Adds the verbs to the parser."""
    ps: argparse.ArgumentParser = verbs.add_parser(
        "ps", help="list the clusters that run here", description="Lists the clusters of `sapwood up` on this machine.",
        epilog=EXIT_CODES, allow_abbrev=False,
    )  # fmt: skip
    ps.add_argument("--json", action="store_true", help="One JSON object a cluster. [default: a table]")
    ps.set_defaults(run=run_ps)
    stop: argparse.ArgumentParser = verbs.add_parser(
        "stop",
        help="stop a cluster that runs here",
        description="Lets running requests finish and ends a cluster of `sapwood up`, detached or not.",
        epilog=EXIT_CODES,
        allow_abbrev=False,
    )
    _add_which(stop)
    stop.add_argument("--all", action="store_true", help="Stop all of them. [default: the only one there is]")
    stop.set_defaults(run=run_stop)
    logs: argparse.ArgumentParser = verbs.add_parser(
        "logs",
        help="show what a detached cluster writes",
        description="Prints the log of a cluster of `sapwood up --detach`.",
        epilog=EXIT_CODES,
        allow_abbrev=False,
    )
    _add_which(logs)
    logs.add_argument(
        "-f", "--follow", action="store_true", help="Show what comes, until it ends. [default: what is there]"
    )
    logs.set_defaults(run=run_logs)


def run_ps(arguments: argparse.Namespace) -> int:
    """Prints a line for each cluster; returns the exit code."""
    found = running_clusters()
    if arguments.json:
        for each in found:
            print(json.dumps(asdict(each)))
        return 0
    rows: list[tuple[str, ...]] = [("PID", "MODEL", "OPENAI API", "GRPC", "UP FOR")]
    for each in found:
        url = f"{each.http}/v1" if each.http else "starting"
        rows.append((str(each.pid), each.model, url, each.grpc or "-", _duration(time.time() - each.started)))
    rows = [tuple(map(one_line, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def run_stop(arguments: argparse.Namespace) -> int:
    """Stops what is meant; returns the exit code, raises CliError."""
    for each in running_clusters() if arguments.all else [_meant(arguments)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each.pid, signal.SIGTERM)
        while _find(each.pid) is not None:
            time.sleep(_POLL_SECONDS)
        print(f"stopped {each.model} ({each.pid})")
    return 0


def run_logs(arguments: argparse.Namespace) -> int:
    """Prints a log; returns the exit code, raises CliError."""
    meant = _meant(arguments)
    if not meant.log:
        raise CliError(f"{meant.model} ({meant.pid}) writes to the terminal that it was started in", REFUSED)
    with Path(meant.log).open() as file:
        while True:
            runs = _find(meant.pid) is not None
            while text := file.read(1 << 16):
                print(text, end="", flush=True)
            if not (arguments.follow and runs):
                return 0
            time.sleep(_POLL_SECONDS)


def _add_which(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("which", nargs="?", metavar="PID|MODEL", help="of several clusters, as `sapwood ps` shows it")


def _meant(arguments: argparse.Namespace) -> Running:
    found, which = running_clusters(), arguments.which
    if which is not None:
        found = [each for each in found if which in (str(each.pid), each.model)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise CliError(
            f"{which}: no such cluster runs here; `sapwood ps` lists those that do"
            if which
            else "no cluster runs here",
            REFUSED,
        )
    several = ", ".join(f"{each.pid} ({each.model})" for each in found)
    raise CliError(f"name one of the clusters that run here: {several}", REFUSED)


def _find(pid: int) -> Running | None:
    return next((each for each in running_clusters() if each.pid == pid), None)


def _is_free(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_old_logs(folder: Path) -> None:
    """Removes the logs of clusters that have ended, but the last five."""
    kept = {each.log for each in running_clusters()}
    for path in sorted(folder.glob("*.log"))[:-5]:
        if str(path) not in kept:
            path.unlink(missing_ok=True)


def _duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    if hours >= 48:
        return f"{hours / 24:.0f} days"
    return f"{hours:.0f} h" if hours >= 2 else f"{minutes:.0f} min" if minutes >= 2 else f"{seconds:.0f} s"


def _folder() -> Path:
    from sapwood_common.models.model_files import sapwood_home

    return sapwood_home() / "run"
