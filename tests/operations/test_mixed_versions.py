"""The last released router, tokenizer and worker together with today's, in all mixes, under load: every answer is the one that
today's services give among themselves. Where Git does not have that release (a tarball, a shallow clone) the tests are skipped.

``docs/versions.md`` says which versions go together. There is no tag yet: a commit stands for the last release.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sapwood.client import Client
from sapwood.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from sapwood_testing.ports import port_of_its_own

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RELEASED = "4f468ab2"
ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("router", "tokenizer", "worker")
PACKAGES = ("sapwood", *(f"sapwood_{name}" for name in ("kernels", "common", *SERVICES)))
FOLDERS = (".", "kernels", "services/common", *(f"services/{name}" for name in SERVICES))
ROUNDS = 3
TEMPLATE = """{% for tool in tools or [] %}<tools>{{ tool | tojson }}</tools>
{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "What is the weather?"}], "seed": 5, "temperature": 0.8}


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], check=True, capture_output=True).stdout


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of the last release and of today's code, each with its stubs."""
    try:
        archive = git("archive", RELEASED)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(f"{RELEASED}, the last release, is not in this Git history")
    folder = tmp_path_factory.mktemp("released")
    with tarfile.open(fileobj=BytesIO(archive)) as packed:
        packed.extractall(folder, filter="data")
    generate = f"import hatch_build, pathlib; hatch_build.generate(pathlib.Path({str(folder)!r}))"
    subprocess.run([sys.executable, "-c", generate], check=True, cwd=folder, timeout=300)
    found = {"old": folder, "new": ROOT}
    for tree in found.values():
        show = "; ".join(f"import {name}; print({name}.__file__)" for name in PACKAGES)
        ran = subprocess.run(
            [sys.executable, "-P", "-c", show], capture_output=True, text=True, env=environment(tree), check=True
        )
        assert all(Path(line).is_relative_to(tree) for line in ran.stdout.split()), ran.stdout
    return found


def environment(tree: Path) -> dict[str, str]:
    """That of processes whose code is in ``tree``: its folders come before those of the installed package."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SAPWOOD_")}
    paths = os.pathsep.join(str(tree / folder) for folder in FOLDERS)
    patient = {"SAPWOOD_ROUTER_WORKER_SILENCE": "30", "SAPWOOD_ROUTER_RESUME_GRACE": "60"}
    return {**kept, **patient, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama of stored weights, bytes as tokens, a chat template that shows tools."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("mixed")
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        initializer_range=0.4,
        bos_token_id=256,
        eos_token_id=257,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>", "<x>", "<y>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "bos_token": "<s>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


class Service:
    """One process of a tree's code."""

    def __init__(self, tree: Path, name: str, log: Path, flags: tuple[str, ...]) -> None:
        self.log = log.open("w+")
        command = [sys.executable, "-P", "-m", "sapwood.cli.local.tied", f"sapwood_{name}", *flags]
        self.process = subprocess.Popen(command, stderr=self.log, cwd=tree, env=environment(tree))

    def wait_for_port(self, port: int) -> None:
        """Returns when it listens."""
        deadline = time.monotonic() + 180
        while f"listening on 127.0.0.1:{port}" not in self.said():
            assert self.process.poll() is None and time.monotonic() < deadline, self.said()
            time.sleep(0.1)

    def said(self) -> str:
        return Path(self.log.name).read_text()

    def end(self, number: int = signal.SIGTERM) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)
            try:
                self.process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.log.close()


class Fleet:
    """Starts services of either tree and stops them in the end."""

    def __init__(self, trees: dict[str, Path], model: Path, logs: Path) -> None:
        self._trees, self._model, self._logs = trees, model, logs
        self._numbers = itertools.count()
        self.running: list[Service] = []

    def start(self, name: str, version: str, *flags: str, port: int | None = None) -> tuple[Service, str]:
        """A tokenizer or worker; returns it and its address. It answers a little later."""
        port = port or port_of_its_own()
        common = ("--model", str(self._model), "--port", str(port), "--served-model-name", "m", "--metrics-port", "0")
        own = {"tokenizer": ("--tool-parser", "hermes"), "worker": ("--threads", "1", "--num-pages", "2048")}[name]
        service = self._start(name, version, *common, *own, *flags)
        return service, f"127.0.0.1:{port}"

    def router(self, version: str, tokenizers: str, workers: list[str]) -> tuple[str, str]:
        """A router; returns its addresses for gRPC and HTTP once it can answer."""
        ports = port_of_its_own(), port_of_its_own()
        flags = (
            "--port",
            str(ports[0]),
            "--http-port",
            str(ports[1]),
            "--tokenizer",
            tokenizers,
            "--workers",
            *workers,
        )
        router = self._start("router", version, *flags, "--most-resumptions", "20", "--queue-wait", "300")
        with httpx.Client(trust_env=False) as client:
            deadline = time.monotonic() + 180
            while True:
                with suppress(httpx.HTTPError):
                    if client.get(f"http://127.0.0.1:{ports[1]}/health", timeout=5).status_code == 200:
                        return f"127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}"
                assert router.process.poll() is None and time.monotonic() < deadline, router.said()
                time.sleep(0.1)

    def end_router(self) -> None:
        self.running.pop().end()

    def close(self) -> None:
        for service in reversed(self.running):
            service.end()

    def _start(self, name: str, version: str, *flags: str) -> Service:
        log = self._logs / f"{next(self._numbers)}-{version}-{name}.log"
        self.running.append(Service(self._trees[version], name, log, flags))
        return self.running[-1]


@pytest.fixture(scope="module")
def fleet(trees: dict[str, Path], model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    running = Fleet(trees, model, tmp_path_factory.mktemp("logs"))
    yield running
    running.close()


class Requests:
    """Streamed requests of every kind to one router."""

    def __init__(self, grpc_address: str, http_address: str) -> None:
        self._client = Client(grpc_address, timeout=240)
        self._http = httpx.Client(base_url=http_address, trust_env=False, timeout=240)
        self.jobs: dict[str, Callable[[], object]] = {
            "text": lambda: self._text("Once upon a time", temperature=0),
            "seed": lambda: self._text("In the beginning", seed=7, temperature=1.0, top_p=0.9),
            "filters": lambda: self._text("A" * 200, seed=9, temperature=0.9, top_k=20, repetition_penalty=1.2),
            "stop": lambda: self._text("abc", seed=3, temperature=1.0, stop=["e", "t"]),
            "chat": lambda: self._chat(max_tokens=40),
            "schema": lambda: self._chat(
                max_tokens=60, response_format={"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA}}
            ),
            "tools": lambda: self._chat(
                max_tokens=300,
                tools=[{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}],
                tool_choice="required",
            ),
            "session": self._session,
            "logprobs": lambda: self._completion(prompt="Hello", max_tokens=8, logprobs=2, temperature=0),
        }

    def close(self) -> None:
        self._client.close()
        self._http.close()

    def _text(self, prompt: str, **options: Any) -> tuple[str, tuple[int, ...]]:
        deltas = list(self._client.generate(prompt, max_tokens=40, ignore_eos=True, **options))
        return "".join(d.text for d in deltas), tuple(token for d in deltas for token in d.token_ids)

    def _session(self) -> tuple[object, ...]:
        session = self._client.open_session(60)
        turns = []
        for turn in ("One two three four five six seven", " eight nine", " ten"):
            deltas = self._client.generate(turn, session=session, max_tokens=20, temperature=0, ignore_eos=True)
            turns.append(tuple(token for delta in deltas for token in delta.token_ids))
        self._client.close_session(session)
        return tuple(turns)

    def _completion(self, **body: Any) -> object:
        answer = self._http.post("/v1/completions", json={"model": "m", **body})
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        return choice["text"], choice["logprobs"]["tokens"]

    def _chat(self, **asked: Any) -> tuple[str, str, str]:
        content = called = reason = ""
        with self._http.stream("POST", "/v1/chat/completions", json={**CHAT, **asked, "stream": True}) as response:
            lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
        assert response.status_code == 200 and lines[-1] == "[DONE]", (response.status_code, lines)
        for event in map(json.loads, lines[:-1]):
            assert "error" not in event, event
            for choice in event["choices"]:
                content += choice["delta"].get("content") or ""
                for call in choice["delta"].get("tool_calls") or ():
                    called += (call["function"].get("name") or "") + (call["function"].get("arguments") or "")
                reason = choice.get("finish_reason") or reason
        return content, called, reason


def run_together(requests: Requests, rounds: int, stop: threading.Event | None = None) -> dict[str, list[object]]:
    """All kinds at once, each in a thread of its own, one after the other within it; answers and exceptions by kind."""
    found: dict[str, list[object]] = {name: [] for name in requests.jobs}

    def ask(name: str) -> None:
        for number in itertools.count():
            if number >= rounds and (stop is None or stop.is_set()):
                return
            try:
                found[name].append(requests.jobs[name]())
            except Exception as error:  # compared with the right answer
                found[name].append(error)

    threads = [threading.Thread(target=ask, args=(name,)) for name in requests.jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.fixture(scope="module")
def parts(fleet: Fleet) -> dict[tuple[str, str], str]:
    """Addresses of an old and a new tokenizer and worker."""
    started = {
        (name, version): fleet.start(name, version) for name in ("tokenizer", "worker") for version in ("old", "new")
    }
    for service, address in started.values():
        service.wait_for_port(int(address.rpartition(":")[2]))
    return {key: address for key, (_, address) in started.items()}


@pytest.fixture(scope="module")
def expected(fleet: Fleet, parts: dict[tuple[str, str], str]) -> dict[str, object]:
    """What today's services answer, to one request at a time."""
    requests = Requests(*fleet.router("new", parts["tokenizer", "new"], [parts["worker", "new"]]))
    try:
        answers = {name: job() for name, job in requests.jobs.items()}
    finally:
        requests.close()
        fleet.end_router()
    assert json.loads(answers["schema"][0])["city"] in ("Rome", "Oslo")  # type: ignore[index]
    assert answers["tools"][1].startswith("weather{") and answers["tools"][2] == "tool_calls"  # type: ignore[index]
    return answers


def test_processes_of_each_tree_run_its_code(parts: dict[tuple[str, str], str]) -> None:
    """Answers of today's workers say their position, those of the released ones do not."""
    said = {}
    for version in ("old", "new"):
        with grpc.insecure_channel(parts["worker", version]) as channel:
            request = worker_pb2.WorkerGenerateRequest(
                request_id="a", token_ids=[1, 2, 3], sampling=common_pb2.SamplingParams(max_tokens=1)
            )
            answers = list(worker_pb2_grpc.WorkerStub(channel).Generate(request, timeout=60))
            said[version] = any(answer.HasField("position") for answer in answers)
    assert said == {"old": False, "new": True}


@pytest.mark.parametrize("mix", list(itertools.product(("old", "new"), repeat=3)), ids="-".join)
def test_every_mix_of_router_tokenizer_and_worker_answers_as_new_ones_do(
    fleet: Fleet, parts: dict[tuple[str, str], str], expected: dict[str, object], mix: tuple[str, str, str]
) -> None:
    router, tokenizer, worker = mix
    requests = Requests(*fleet.router(router, parts["tokenizer", tokenizer], [parts["worker", worker]]))
    try:
        found = run_together(requests, ROUNDS)
    finally:
        requests.close()
        fleet.end_router()
    wrong = {name: answers for name, answers in found.items() if answers != [expected[name]] * ROUNDS}
    assert not wrong, {name: expected[name] for name in wrong}


@pytest.mark.parametrize("version", ["old", "new"])
def test_streams_move_between_versions_when_workers_and_tokenizers_are_replaced(
    fleet: Fleet, expected: dict[str, object], version: str
) -> None:
    """Each of two workers and two tokenizers is killed in turn and started again, while requests run."""
    running = {}
    for name in ("tokenizer", "worker"):
        for each in ("old", "new"):
            running[name, each] = fleet.start(name, each)
    for service, address in running.values():
        service.wait_for_port(int(address.rpartition(":")[2]))
    tokenizers = ",".join(running["tokenizer", each][1] for each in ("old", "new"))
    requests = Requests(*fleet.router(version, tokenizers, [running["worker", each][1] for each in ("old", "new")]))
    stopping, found = threading.Event(), {}
    load = threading.Thread(target=lambda: found.update(run_together(requests, ROUNDS, stopping)))
    try:
        load.start()
        for name, each in (("worker", "old"), ("tokenizer", "old"), ("worker", "new"), ("tokenizer", "new")):
            time.sleep(1)
            service, address = running[name, each]
            service.end(signal.SIGKILL)
            fleet.running.remove(service)
            port = int(address.rpartition(":")[2])
            running[name, each] = fleet.start(name, each, port=port)
            running[name, each][0].wait_for_port(port)
    finally:
        stopping.set()
        load.join()
        requests.close()
        fleet.end_router()
    wrong = {
        name: bad for name, answers in found.items() if (bad := [each for each in answers if each != expected[name]])
    }
    assert not wrong, {name: expected[name] for name in wrong}
    assert sum(map(len, found.values())) >= ROUNDS * len(expected)


@pytest.mark.parametrize(("first", "second"), [("old", "new"), ("new", "old")])
def test_stored_pages_of_one_format_serve_workers_of_either_version(
    fleet: Fleet,
    parts: dict[tuple[str, str], str],
    expected: dict[str, object],
    tmp_path: Path,
    first: str,
    second: str,
) -> None:
    """``PAGE_FORMAT`` is what both versions have; were it another, the second would compute the prompt."""
    store = ("--storage", f"file://{tmp_path}", "--host-cache-gb", "0.05", "--storage-min-tokens", "16")
    store += ("--storage-prefetch", "wait_complete")
    answers = []
    for version in (first, second):
        service, worker = fleet.start("worker", version, *store)
        service.wait_for_port(int(worker.rpartition(":")[2]))
        _, address = fleet.router("new", parts["tokenizer", "new"], [worker])
        body = {"model": "m", "prompt": "Once upon a time " * 20, "max_tokens": 20, "temperature": 0}
        with httpx.Client(base_url=address, trust_env=False, timeout=240) as client:
            answer = client.post("/v1/completions", json=body).json()
        cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        answers.append((answer["choices"][0]["text"], cached))
        deadline = time.monotonic() + 60
        while version == first and len(list(tmp_path.rglob("*"))) < 20:
            assert time.monotonic() < deadline, "nothing was stored"
            time.sleep(0.1)
        fleet.end_router()
        service.end()
        fleet.running.remove(service)
    assert answers[0][0] == answers[1][0]
    assert answers[0][1] == 0
    assert answers[1][1] > 300, "it was computed again"
