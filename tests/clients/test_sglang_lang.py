"""SGLang's language as a client: its published programs, and programs that also run with ours, against the demo model."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from sapwood_common.models.model_files import sapwood_home

pytestmark = [pytest.mark.slow, pytest.mark.clients, pytest.mark.timeout(3600)]

RELEASE = "sglang==0.5.23"
NEEDS = ("numpy", "requests", "aiohttp", "msgspec", "tqdm", "pybase64", "pydantic")
SCRIPTS = Path(__file__).parent / "scripts"

PUBLISHED = (
    *(
        "few_shot_qa",
        "mt_bench",
        "select",
        "decode_int",
        "decode_json_regex",
        "decode_json",
        "expert_answer",
        "tool_use",
    ),
    *("react", "parallel_encoding", "parallel_decoding", "stream", "stream_logprobs", "regex", "dtype_gen"),
    *("completion_speculative", "gen_min_new_tokens"),
)
ABOUT_THE_MODEL = {
    "decode_int": "assert int",  # the demo model writes 24 and then zeros for as long as it may
    "decode_json_regex": "JSONDecodeError",  # it does not close its strings within max_tokens
    "decode_json": "JSONDecodeError",
}
"""Programs whose last line asks for more than a model of 270 million parameters knows, and how they then end."""


@pytest.fixture(scope="module")
def release() -> Path:
    """The folder with the release's language and test programs, fetched without what the release requires."""
    folder = sapwood_home() / "clients" / "sources" / f"{RELEASE}-lang"
    if not (folder / "complete").exists():
        with tempfile.TemporaryDirectory() as fetched:
            download = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
            subprocess.run([*download, "--only-binary", ":all:", "-d", fetched, RELEASE], check=True)
            (wheel,) = Path(fetched).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                kept = ("sglang/lang/", "sglang/test/test_programs.py", "sglang/__init__.py", "sglang/utils.py")
                names = [name for name in archive.namelist() if name.startswith((*kept, "sglang/version.py"))]
                archive.extractall(folder, names)
        (folder / "complete").touch()
    return folder


@pytest.fixture(scope="module")
def python(make_environment: Any) -> Path:
    return Path(make_environment(*NEEDS)) / "python"


def test_published_programs_run_unchanged(cluster: Any, run_client: Any, python: Path, release: Path) -> None:
    names = [f"test_{name}" for name in PUBLISHED]
    out = run_client(python, SCRIPTS / "sglang_lang.py", release, f"http://{cluster.http}", *names)
    ended = json.loads(out.splitlines()[-1])
    assert set(ended) == set(names)
    for name, how in ended.items():
        expected = ABOUT_THE_MODEL.get(name.removeprefix("test_"))
        assert how == "ok" or (expected is not None and expected in how), (name, how)


def test_the_same_source_gives_the_same_with_their_language_and_with_ours(
    cluster: Any, run_client: Any, python: Path, release: Path
) -> None:
    url = f"http://{cluster.http}"
    theirs = json.loads(run_client(python, SCRIPTS / "programs.py", release, url).splitlines()[-1])
    ours = json.loads(run_client(sys.executable, SCRIPTS / "programs.py", "sapwood", url).splitlines()[-1])
    assert set(ours) == set(theirs) and len(ours) >= 11
    for name, found in theirs.items():
        assert ours[name] == found, name


def test_a_tree_of_thought_and_choices_ask_half_as_often_and_compute_little_again(
    start_cluster_of: Any,
    demo_model: Path,
    run_client: Any,
    python: Path,
    release: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    flags = ("--worker-metrics-port", str(port))
    with start_cluster_of("--model", "demo-base", "--workers", "1", *flags) as server:
        url = f"http://{server.http}"
        counted = ("--count", server.grpc, f"http://127.0.0.1:{port}")
        theirs = json.loads(run_client(python, SCRIPTS / "programs.py", release, url, *counted).splitlines()[-1])
        ours = json.loads(
            run_client(sys.executable, SCRIPTS / "programs.py", "sapwood", url, *counted).splitlines()[-1]
        )
    for name, their in theirs.items():
        our = ours[name]
        with capsys.disabled():
            print(f"\n{name}: ours {our}, theirs {their}")
        again, their_again = (each["computed"] - each["distinct"] for each in (our, their))
        assert our["requests"] <= their["requests"] / 2
        assert again <= our["computed"] / 10
        assert again <= their_again / 10 and their_again > 0
