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

from sapwood.cli.main import build_parser, in_full
from sapwood.cli.up import NAMES
from sapwood_common.settings.config import build_parser as service_parser
from sapwood_router.config import RouterConfig
from sapwood_tokenizer.config import TokenizerConfig
from sapwood_worker.config import WorkerConfig

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]

# Run by hand and by CI: they install, test or serve. That their targets exist is checked below.
LARGE = re.compile(r"^(make \w|(SAPWOOD_\w+=\S+ )*sapwood up)")


# Answers are cut short: a token takes the demo model a tenth of a second and more on one core.
LONG_ANSWER = re.compile(r"(max[-_]tokens\W+)32\b")


class Block(NamedTuple):
    page: str
    language: str
    code: str


def _blocks() -> list[Block]:
    found = [
        Block(page.name, language, code)
        for page in PAGES
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


COMMAND = re.compile(
    r"(?:^|`)(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?((?:sapwood|python -m sapwood_[a-z]+) (?:'[^'\n]*'|\"[^\"\n]*\"|[^`\n\[|>&#'\"])*)",
    re.MULTILINE,
)
"""A command line of ours in a block or in the text, up to what the shell does with it."""
SERVICES = {"sapwood_router": RouterConfig, "sapwood_tokenizer": TokenizerConfig, "sapwood_worker": WorkerConfig}


def test_every_command_that_is_named_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    services = {name: service_parser(config, name, "") for name, config in SERVICES.items()}
    up, others = build_parser("up"), build_parser()
    named = [(page, found) for page in PAGES for found in COMMAND.findall(page.read_text().replace("\\\n", " "))]
    assert len(named) > 100
    for page, command in named:
        words = shlex.split(command)
        of_service = words[0] == "python"
        flags = words[3:] if of_service else in_full(words[1:])
        parser = services[words[2]] if of_service else up if flags[0] in NAMES else others
        try:
            parser.parse_args(flags)
        except SystemExit as ended:  # in the text, it may be named without what it works on
            assert ended.code == 0 or "are required" in (said := capsys.readouterr().err), (
                f"{page.name}: {command}: {said}"
            )


def test_no_page_and_no_message_names_a_flag_that_has_another_name_now() -> None:
    configs = {"router": RouterConfig, "tokenizer": TokenizerConfig, "worker": WorkerConfig}
    present = {field for config in configs.values() for field in config.model_fields}
    gone = {old for config in configs.values() for old in config.retired if old not in present}
    gone |= {f"{service}_{old}" for service, config in configs.items() for old in config.retired}
    gone -= {f"{service}_{field}" for service, config in configs.items() for field in config.model_fields}
    flags = re.compile(rf"--({'|'.join(old.replace('_', '-') for old in gone)})(?![\w-])")
    written = {"configuration.md", "sglang-flags.md"}  # they say what old and others' flags are called now
    history = {"CHANGELOG.md", *(page.name for page in PAGES if page.name.startswith("figures"))}
    for page in PAGES:
        if page.name not in written | history:
            assert not (found := flags.findall(page.read_text())), f"{page.name}: {found}"
    sources = [path.read_text() for path in (ROOT / "services").rglob("*.py")]
    named = [
        found for text in sources for found in re.findall(r"service_flag\(['\"](\w+)['\"], ['\"]([\w-]+)['\"]\)", text)
    ]
    assert len(named) > 3
    for service, name in named:
        assert name.replace("-", "_") in configs[service].model_fields, f"--{name} of the {service}"


def test_every_make_target_that_is_named_exists() -> None:
    inline = [found for page in PAGES for found in re.findall(r"`make ([a-z-]+)", page.read_text())]
    scripts = [block.code for block in BLOCKS] + [(ROOT / ".ci" / "run").read_text()]
    started = [found for script in scripts for found in re.findall(r"^(?:twice )?make ([a-z-]+)", script, re.MULTILINE)]
    named = {*inline, *started}
    existing = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"up", "test", "lint", "bench-cpu"} <= named <= existing


def _anchors(page: Path) -> set[str]:
    """Where a link into a page can lead: its headings, in GitHub's spelling."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_pages_lead_somewhere() -> None:
    links = [(page, link) for page in PAGES for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())]
    assert len(links) > 100
    for page, link in links:
        if not link.startswith("http"):
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            assert target.exists(), f"{page.name}: {link}"
            assert not anchor or target.suffix != ".md" or anchor in _anchors(target), f"{page.name}: {link}"


@pytest.mark.parametrize("writer", ["write_configuration.py", "write_checkpoint_keys.py", "write_sglang_flags.py"])
def test_a_page_that_is_written_from_the_code_is_fresh(writer: str) -> None:
    command = [sys.executable, str(ROOT / "docs" / writer), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
