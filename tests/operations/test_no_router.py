"""`sapwood up --no-router`: a worker that answers HTTP by itself, asked as vLLM's users ask, with OpenAI's client."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "chat.jinja"
    path.write_text(_TEMPLATE)
    return path


def _descendants(pid: int) -> Iterator[int]:
    yield pid
    for child in _children(pid):
        yield from _descendants(child)


def _children(pid: int) -> list[int]:
    for _ in range(10):  # a thread that ends meanwhile leaves its children to another one
        with contextlib.suppress(FileNotFoundError):
            threads = Path(f"/proc/{pid}/task").iterdir()
            return [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    return []


def _listening_ports(pids: set[int]) -> set[int]:
    """The TCP ports that these processes listen on."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                if found := re.fullmatch(r"socket:\[(\d+)\]", str(descriptor.readlink())):
                    inodes.add(found[1])
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in inodes}


def test_one_command_and_one_port_answer_openais_client(start_cluster: Any, template: Path) -> None:
    flags = ("--no-router", "--served-model-name", "tiny", "--tokenizer-chat-template", str(template))
    with start_cluster(*flags) as cluster:
        port = int(cluster.http.rpartition(":")[2])
        assert _listening_ports(set(_descendants(cluster.process.pid))) == {port}
        with openai.OpenAI(base_url=f"http://{cluster.http}/v1", api_key="none", timeout=120, max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["tiny"]
            completion = client.completions.create(
                model="tiny", prompt="ab", max_tokens=4, temperature=0, extra_body={"ignore_eos": True}
            )
            assert completion.usage is not None and completion.usage.completion_tokens == 4
            asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "seed": 1}
            whole = client.chat.completions.create(**asked)
            chunks = list(client.chat.completions.create(**asked, stream=True))
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            assert text == whole.choices[0].message.content
            assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
            with pytest.raises(openai.NotFoundError):
                client.completions.create(model="another", prompt="ab")
            with pytest.raises(openai.BadRequestError, match="temperature"):
                client.completions.create(model="tiny", prompt="ab", temperature=-1)
        with httpx.Client(base_url=f"http://{cluster.http}", timeout=120) as plain:
            assert plain.get("/health").status_code == 200
            page = plain.get("/metrics").text
        for name in ("sapwood_router_requests_total", "sapwood_worker_", "sapwood_tokenizer_", "process_cpu_seconds"):
            assert f"\n{name}" in page
        types = [line for line in page.splitlines() if line.startswith("# TYPE")]
        assert len(types) == len(set(types)), "each family once"
        sockets = Path(cluster.grpc.removeprefix("unix:")).parent
        assert sockets.is_dir()
    assert not sockets.exists()


@pytest.mark.slow
def test_a_worker_that_dies_is_started_again_and_serves_again(start_cluster: Any) -> None:
    with (
        start_cluster("--no-router", "--served-model-name", "tiny") as cluster,
        openai.OpenAI(base_url=f"http://{cluster.http}/v1", api_key="none", timeout=120, max_retries=0) as client,
    ):
        os.kill(cluster.service_pid("sapwood_worker"), signal.SIGKILL)
        cluster.wait_for_line("worker-0 was killed by SIGKILL: it is started again")
        with httpx.Client(base_url=f"http://{cluster.http}", timeout=120) as plain:
            while plain.get("/health").status_code != 200:
                pass
        assert client.completions.create(model="tiny", prompt="ab", max_tokens=2).choices


@pytest.mark.slow
def test_a_stream_outlives_the_only_scheduler(start_cluster: Any) -> None:
    with (
        start_cluster("--no-router", "--served-model-name", "tiny") as cluster,
        openai.OpenAI(base_url=f"http://{cluster.http}/v1", api_key="none", timeout=500, max_retries=0) as client,
    ):
        asked: Any = {
            "model": "tiny",
            "prompt": "ab",
            "max_tokens": 2000,
            "seed": 1,
            "extra_body": {"ignore_eos": True},
        }
        whole = client.completions.create(**asked).choices[0].text
        stream = client.completions.create(**asked, stream=True)
        text = next(stream).choices[0].text
        _, scheduler, *_ = _descendants(cluster.service_pid("sapwood_worker"))
        os.kill(scheduler, signal.SIGKILL)
        assert text + "".join(chunk.choices[0].text for chunk in stream) == whole
        page = httpx.get(f"http://{cluster.http}/metrics", timeout=120).text
    assert "\nsapwood_router_resumptions_total 1.0\n" in page
