"""What README and docs tell the reader to type works: every code block is run, or is one of the few known too large for that."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sapwood.cli.main import build_parser

ROOT = Path(__file__).resolve().parents[2]

# Run by hand and by CI: they install, test or serve. That their targets exist is checked below.
LARGE = re.compile(r"^(make \w|(SAPWOOD_\w+=\S+ )*sapwood up)")


# Answers are cut short: a token takes the demo model a tenth of a second and more on one core.
LONG_ANSWER = re.compile(r"(max[-_]tokens\W+)32\b")


class Block(NamedTuple):
    page: str
    language: str
    code: str


def _blocks() -> list[Block]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = [
        Block(page.name, language, code)
        for page in pages
        for language, code in re.findall(r"^```(bash|python)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    ]
    assert len(found) > 10
    return found


BLOCKS = _blocks()
RUNNABLE = [block for block in BLOCKS if not LARGE.match(block.code)]


def _param(block: Block) -> Any:
    slow = block.page != "README.md" or "import sapwood\n" in block.code  # it loads the model itself
    return pytest.param(block, id=f"{block.page}-{block.code.split()[0]}", marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize("block", list(map(_param, RUNNABLE)))
def test_the_block_runs(cluster: Any, block: Block) -> None:
    code = block.code.replace("127.0.0.1:50051", cluster.grpc).replace("127.0.0.1:8000", cluster.http)
    code = LONG_ANSWER.sub(r"\g<1>8", code)
    environment = {
        **os.environ,
        "SAPWOOD_ROUTER": cluster.grpc,
        "PATH": f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}",
    }
    command = [sys.executable, "-c", code] if block.language == "python" else ["bash", "-euc", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_every_flag_that_is_named_with_sapwood_up_is_one() -> None:
    commands = [line for block in BLOCKS for line in re.findall(r"^sapwood up (--.*)$", block.code, re.MULTILINE)]
    assert commands
    for command in commands:
        assert build_parser("up").parse_args(["up", *shlex.split(command)])


def test_every_make_target_that_is_named_exists() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / ".ci" / "run"]
    named = {
        target for page in pages for target in re.findall(r"(?:`|^)make ([a-z-]+)", page.read_text(), re.MULTILINE)
    }
    existing = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"up", "test", "lint", "bench-cpu"} <= named <= existing


def test_links_between_pages_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert link.startswith("http") or (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_configuration_page_is_fresh() -> None:
    command = [sys.executable, str(ROOT / "docs" / "write_configuration.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
