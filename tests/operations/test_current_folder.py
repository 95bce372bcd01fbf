"""Nothing in the folder in which Sapwood is started is run: it may be a model that somebody downloaded."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from sapwood.cli.local.child import Child
from sapwood_common.grammar.compiler import CompilePool
from sapwood_common.grammar.source import GrammarSource
from sapwood_common.python_process import python_command, python_environment
from sapwood_testing.traps import lay_traps

pytestmark = pytest.mark.skipif(sys.flags.safe_path, reason="nothing in the current folder is run anyway")
_COMMAND = Path(sys.executable).with_name("sapwood")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    return tmp_path


def test_sapwood_up_in_a_models_folder_runs_no_file_of_it(here: Path, dummy_model: Path) -> None:
    shutil.copytree(dummy_model, here, dirs_exist_ok=True)
    sprung = lay_traps(here)
    flags = (
        "--ports",
        "auto",
        "--workers",
        "1",
        "--threads",
        "1",
        "--served-model-name",
        "tiny",
        "--tensor-parallel",
        "2",
    )
    dummy = ("--worker-load-format", "dummy", "--worker-num-pages", "64")
    process = subprocess.Popen([_COMMAND, "up", ".", *flags, *dummy], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url, lines = "", []
        for line in process.stdout:
            lines.append(line)
            if "OpenAI API" in line:
                url = line.split()[-1]
            if line.startswith("Ctrl-C stops it"):
                break
        assert url, "".join(lines)
        body = {"model": "tiny", "prompt": "a", "max_tokens": 4, "guided_regex": "a(b|c)+"}
        asked = urllib.request.Request(
            f"{url}/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked, timeout=120) as answer:
            assert json.load(answer)["choices"][0]["text"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
    assert not sprung.exists(), sprung.read_text()


@pytest.mark.parametrize(
    "module",
    ["sapwood_router", "sapwood_tokenizer", "sapwood_worker", "sapwood_common.serving.probe", "sapwood.cli.main"],
)
def test_a_service_that_python_starts_imports_nothing_of_the_current_folder(here: Path, module: str) -> None:
    sprung = lay_traps(here, module.partition(".")[0])  # Python itself imports that before the service can object
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not sprung.exists(), sprung.read_text()


async def test_a_grammar_is_compiled_without_the_current_folder(here: Path) -> None:
    sprung = lay_traps(here)
    pool = CompilePool(())
    try:
        assert await pool.compile(GrammarSource("regex", "a+"))
    finally:
        await pool.close()
    assert not sprung.exists(), sprung.read_text()


async def test_a_tied_child_imports_nothing_of_the_current_folder(here: Path) -> None:
    sprung = lay_traps(here)
    child = await Child.start("probe", "sapwood_common.serving.probe", ["--help"], lambda name, line: None)
    await asyncio.wait_for(child.exited.wait(), 120)
    assert child.exit_code == 0, child.last_lines
    assert not sprung.exists(), sprung.read_text()


_SPAWNS = """
import multiprocessing, runpy, subprocess, sys
def nothing(): import queue, random
if __name__ == "__main__":
    process = multiprocessing.get_context(sys.argv[1]).Process(target=nothing)
    process.start(); process.join()
    subprocess.run([sys.executable, "-c", "import queue, random"], check=True)
    sys.exit(process.exitcode)
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_what_a_child_starts_itself_imports_nothing_of_the_current_folder(here: Path, method: str) -> None:
    sprung = lay_traps(here)
    program = here / "inner" / "program.py"
    program.parent.mkdir()
    program.write_text(_SPAWNS)
    subprocess.run(python_command(str(program), method), env=python_environment(), timeout=120, check=True)
    assert not sprung.exists(), sprung.read_text()
    assert "PYTHONSAFEPATH" not in os.environ
