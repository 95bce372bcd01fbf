"""The routers under measurement as processes: ours and its peers from PyPI, each in front of the same mock workers."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
PEERS = HERE.parent / ".peers"
_READY_SECONDS = 60.0
PEER_VERSIONS = {"smg": "1.13.0", "sglang-router": "0.3.2", "vllm-router": "0.1.17"}
_PEER_NEEDS = ("setproctitle", "orjson", "fastapi", "uvicorn", "aiohttp", "requests")
"""What their launchers import."""
OURS = "sapwood"
"""The router of this checkout. That of another one goes by the path of its folder."""


def is_ours(engine: str) -> bool:
    """Whether it is a router of ours, of this checkout or of another one."""
    return engine == OURS or "/" in engine


class Ports:
    """Ports of 127.0.0.1 that nobody else is given before :meth:`close`.

    A socket that is bound and does not listen keeps each: Linux then gives it to nobody who asks for any port, and does not
    keep those from listening who name it and set SO_REUSEADDR, as servers do.
    """

    def __init__(self) -> None:
        self._keepers: list[socket.socket] = []

    def take(self) -> int:
        """Another one."""
        keeper = socket.socket()
        self._keepers.append(keeper)
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("127.0.0.1", 0))
        port: int = keeper.getsockname()[1]
        return port

    def close(self) -> None:
        """Gives them back."""
        for keeper in self._keepers:
            keeper.close()


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and of its children, all threads that live."""
    total = 0
    for each in (pid, *_children(pid)):
        for thread in Path(f"/proc/{each}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):
                total += int(thread.read_text().split()[0])  # nanoseconds
    return total / 1e9


def resident_mb(pid: int) -> float:
    """Resident memory of a process and of its children, in MB."""
    total = 0.0
    for each in (pid, *_children(pid)):
        with contextlib.suppress(OSError):
            pages = int(Path(f"/proc/{each}/statm").read_text().split()[1])
            total += pages * os.sysconf("SC_PAGE_SIZE") / 1e6
    return total


def _children(pid: int) -> list[int]:
    try:
        direct = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [each for child in direct for each in (child, *_children(child))]


@dataclass
class Process:
    """A started process; ``stop`` ends it."""

    command: list[str]
    environment: dict[str, str]
    log: Path
    handle: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        with self.log.open("ab") as log:
            self.handle = subprocess.Popen(
                self.command, env={**os.environ, **self.environment}, stdout=log, stderr=subprocess.STDOUT
            )

    @property
    def pid(self) -> int:
        return self.handle.pid

    def stop(self) -> None:
        """At once."""
        with contextlib.suppress(ProcessLookupError):
            self.handle.send_signal(signal.SIGCONT)
        self.handle.kill()
        self.handle.wait()


@dataclass(frozen=True)
class Times:
    """What the mock workers take; see ``mock_worker.py``."""

    blocks: int = 1_000_000
    base_ms: float = 0.0
    block_us: float = 0.0
    pace_ms: float = 0.0
    max_running: int = 256


class Workers:
    """Four mock workers and the mock tokenizer. Use as a context manager.

    Args:
        times: Of all workers.
        folder: For logs.
        count: How many.
        answers: What they answer; see ``mock_worker.py``.

    Attributes:
        ports: Theirs, and those of who is measured with them.
    """

    def __init__(self, times: Times, folder: Path, count: int = 4, answers: Path | None = None) -> None:
        self._times = times
        self._folder = folder
        self.ports = Ports()
        self.http_ports = [self.ports.take() for _ in range(count)]
        self.grpc_ports = [self.ports.take() for _ in range(count)]
        self.tokenizer_port = self.ports.take()
        self.processes: list[Process] = []
        self._epoch = 0
        self._answers = answers

    def start_worker(self, number: int) -> Process:
        """Starts one, on its ports."""
        self._epoch += 1
        times = self._times
        flags = {
            "--http-port": self.http_ports[number],
            "--grpc-port": self.grpc_ports[number],
            "--blocks": times.blocks,
            "--base-ms": times.base_ms,
            "--block-us": times.block_us,
            "--pace-ms": times.pace_ms,
            "--max-running": times.max_running,
            "--epoch": self._epoch,
        }
        given = () if self._answers is None else ("--answers", str(self._answers))
        return self._start("mock_worker", *(str(part) for pair in flags.items() for part in pair), *given)

    def __enter__(self) -> Workers:
        self.processes = [self.start_worker(number) for number in range(len(self.http_ports))]
        self.processes.append(self._start("mock_tokenizer", "--port", str(self.tokenizer_port)))
        try:
            for port in self.http_ports:
                wait_for(lambda port=port: get(port, "/stats")[0] == 200, f"mock worker on {port}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.stop()
        self.ports.close()

    def _start(self, module: str, *flags: str) -> Process:
        command = [sys.executable, "-m", f"router_load.{module}", *flags]
        return Process(command, {"PYTHONPATH": _path(HERE.parent)}, self._folder / f"{module}.log")


@dataclass
class Router:
    """A running router: where it takes requests, and its process."""

    engine: str
    process: Process
    http_port: int
    grpc_port: int = 0

    def rest(self) -> None:
        """Waits until it has nothing left to do."""
        before = -1.0
        while (now := cpu_seconds(self.process.pid)) - before > 0.02:
            before = now
            time.sleep(0.2)


@contextlib.contextmanager
def running(
    engine: str,
    workers: Workers,
    folder: Path,
    *flags: str,
    policy: str = "cache_aware",
    headers: Mapping[str, str] | None = None,
) -> Iterator[Router]:
    """A router in front of the workers, ready for requests, which it may expect to have certain ``headers``."""
    start = _start_ours if is_ours(engine) else _start_peer
    router = start(engine, workers, folder, policy, flags)
    try:
        _await_ready(router, workers, headers or {})
        yield router
    finally:
        router.process.stop()


def _start_ours(engine: str, workers: Workers, folder: Path, policy: str, flags: tuple[str, ...]) -> Router:
    http_port, grpc_port = workers.ports.take(), workers.ports.take()
    python = sys.executable if engine == OURS else f"{engine}/.venv/bin/python"
    command = [
        *(python, "-m", "sapwood_router", "--host", "127.0.0.1", "--log-level", "warning"),
        *("--http-port", str(http_port), "--port", str(grpc_port), "--policy", policy),
        *("--tokenizer", f"127.0.0.1:{workers.tokenizer_port}"),
        *("--workers", *(f"127.0.0.1:{port}" for port in workers.grpc_ports)),
        *flags,
    ]
    return Router(engine, Process(command, {}, folder / f"{engine.replace('/', '_')}.log"), http_port, grpc_port)


def _start_peer(engine: str, workers: Workers, folder: Path, policy: str, flags: tuple[str, ...]) -> Router:
    port = workers.ports.take()
    module = {
        "smg": ("smg", "launch"),
        "sglang-router": ("sglang_router", "launch"),
        "vllm-router": ("vllm_router.launch_router",),
    }[engine]
    urls = [f"http://127.0.0.1:{port}" for port in workers.http_ports]
    command = [sys.executable, "-m", *module, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--policy", policy, "--worker-urls", *urls, "--prometheus-port", str(workers.ports.take())]
    command += ["--log-level", "warning" if engine == "vllm-router" else "warn", *flags]
    path = _path(PEERS / engine, PEERS / "shared")
    return Router(engine, Process(command, {"PYTHONPATH": path}, folder / f"{engine}.log"), port)


def _await_ready(router: Router, workers: Workers, headers: Mapping[str, str]) -> None:
    """Until every worker has answered a request."""

    def served() -> bool:
        post(
            router.http_port,
            "/v1/completions",
            b'{"model":"mock","prompt":"%d","max_tokens":1}' % time.time_ns(),
            headers,
        )
        return all(get(port, "/stats")[1].find(b'"requests":0') < 0 for port in workers.http_ports)

    def answers() -> bool:
        assert router.process.handle.poll() is None, f"{router.engine} ended; see {router.process.log}"
        body = b'{"model":"mock","prompt":"Hello","max_tokens":1}'
        return post(router.http_port, "/v1/completions", body, headers)[0] == 200

    wait_for(answers, router.engine)
    with contextlib.suppress(TimeoutError):  # a cache-aware router may well keep to one worker
        wait_for(served, router.engine, 3.0)
    for port in workers.http_ports:
        get(port, "/reset")


def get(port: int, path: str) -> tuple[int, bytes]:
    """One HTTP request; status 0 if nobody answers."""
    return _ask("GET", port, path, None, {})


def post(port: int, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
    """The same with a JSON body."""
    return _ask("POST", port, path, body, {"content-type": "application/json", **(headers or {})})


def _ask(method: str, port: int, path: str, body: bytes | None, headers: Mapping[str, str]) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request(method, path, body, dict(headers))
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def wait_for(condition: Callable[[], bool], what: str, seconds: float = _READY_SECONDS) -> None:
    """Returns once the condition holds.

    Raises:
        TimeoutError: It did not within ``seconds``.
    """
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"{what} is not ready after {seconds:g} s")
        time.sleep(0.05)


def install_peers() -> list[str]:
    """Installs what is missing of the peers, each into a folder of its own, and returns the names of those that are there."""
    present = []
    for name, version in PEER_VERSIONS.items():
        target = PEERS / name
        if target.exists() or _pip("--no-deps", "--target", str(target), f"{name}=={version}"):
            present.append(name)
        else:
            print(f"{name} {version} cannot be installed here: left out", file=sys.stderr)
    if present and not (PEERS / "shared").exists():
        _pip("--target", str(PEERS / "shared"), *_PEER_NEEDS)
    return present


def _pip(*arguments: str) -> bool:
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, check=False).returncode == 0


def _path(*folders: Path) -> str:
    return os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
