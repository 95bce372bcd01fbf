"""Runs another project's own HTTP tests against the demo model: ``python tests/clients/run_suite.py vllm [ARGUMENTS OF PYTEST]``.

The suite is fetched from PyPI into SAPWOOD_HOME, together with an environment for it, and is never part of this repository.
At the end it prints how many tests passed, and whose the failures are: ``suite_reasons.toml`` has the reasons.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import threading
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sapwood_common.models.model_files import packaged_path, sapwood_home

HERE = Path(__file__).parent
NEEDED = (
    *("openai==3.54.0", "anthropic==2.10.0", "requests", "filelock", "pytest-timeout", "pytest-asyncio", "wget"),
    *("setuptools>=77", "setuptools_rust", "setuptools_scm", "wheel", "regex", "partial-json-parser", "jsonschema"),
    *("pytest-xdist",),
    *("pybase64", "fastapi", "rich", "hatchling", "httpx2", "aiohttp"),
)
# Of vLLM those of text over HTTP: the others start processes of their own, or are about modules of vLLM.
VLLM = (
    *("anthropic/test_messages.py", "openai/chat_completion/test_chat.py"),
    *("openai/chat_completion/test_chat_completion.py", "openai/chat_completion/test_chat_logit_bias_validation.py"),
    *("openai/chat_completion/test_chat_echo.py", "openai/chat_completion/test_include_reasoning.py"),
    *("openai/chat_completion/test_completion_with_function_calling.py", "openai/completion/test_completion.py"),
    *("openai/completion/test_prompt_validation.py", "openai/responses/test_simple.py"),
    *("openai/responses/test_basic.py", "openai/responses/test_stateful.py"),
    *("openai/responses/test_structured_output.py", "openai/test_return_token_ids.py"),
    *("openai/test_return_tokens_as_ids.py", "openai/test_stop_token_ids.py", "openai/models/test_models.py"),
    *("serve/tokenize/test_tokenization.py", "serve/instrumentator/test_basic.py"),
    *("openai/chat_completion/test_extra_content_fields.py", "openai/test_session_id.py"),
    *("openai/chat_completion/test_non_object_body_validation.py",),
)
# Four tests at once share the model's steps. Not where tests pause the server or abort all that runs.
AT_ONCE = ("-n", "4", "--dist", "load")


@dataclass(frozen=True)
class Suite:
    """A suite of tests.

    Attributes:
        release: Where the tests are from.
        kept: Which of its files are unpacked.
        folder: Where in them the tests run.
        tests: Which ones.
        flags: Further arguments of pytest.
        replaced: Patterns in the tests' texts, and what is written instead.
    """

    release: str
    kept: str
    folder: str
    tests: Sequence[str]
    flags: Sequence[str] = ("--import-mode=prepend", *AT_ONCE)
    replaced: Sequence[tuple[str, str]] = ()
    settings: dict[str, str] = field(default_factory=dict)


SUITES = {
    "sglang": Suite(
        release="sglang==0.5.23",
        kept=r"sglang/test/kits/\w+\.py$",
        folder=".",
        tests=(str(HERE / "suite_sglang.py"),),
        flags=("--noconftest", "--import-mode=importlib"),
    ),
    "llama.cpp": Suite(
        release="llama-cpp-python==0.3.36",
        kept=r"[^/]+/vendor/llama\.cpp/tools/server/tests/",
        folder="*/vendor/llama.cpp/tools/server/tests",
        tests=("unit", "--ignore=unit/test_tool_call.py"),  # which asks for what certain models write, by their files
        replaced=((r'(model=)"(?:gpt|davinci|text-embedding)-[^"]*"', r'\1"demo"'),),
    ),
    "vllm": Suite(
        release="vllm==0.33.0",
        kept=r"[^/]+/tests/(entrypoints/|__init__\.py|entrypoints\b)",
        folder="vllm-*",
        tests=tuple(f"tests/entrypoints/{each}" for each in VLLM),
        replaced=(
            (r'(?m)^(MODEL_NAME|MODEL) = ".*"$', r'\1 = "demo"'),
            ('"claude-3-7-sonnet-latest"', '"demo"'),
        ),
        settings={"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": "0.33.0"},
    ),
    "openai": Suite(
        release="openai==3.54.0",
        kept=r"[^/]+/tests/(api_resources/|respx2/|(__init__|conftest|utils)\.py|sample_file\.txt)",
        folder="openai-*",
        tests=tuple(
            f"tests/api_resources/{each}"
            for each in (
                *(
                    "chat",
                    "test_completions.py",
                    "test_responses.py",
                    "responses",
                    "test_embeddings.py",
                    "test_models.py",
                ),
                "test_moderations.py",
            )
        ),
        flags=("--import-mode=prepend", *AT_ONCE),
        replaced=(
            (r'\b(model=)"[^"]*"', r'\1"demo"'),
            (r'^( +)"gpt-6-astra",$', r'\1"demo",'),
        ),
    ),
}


def environment(folder: Path) -> Path:
    """The Python of the suites: our packages, and those that the tests need."""
    python, complete = folder / "environment" / "bin" / "python", folder / "environment" / "complete"
    if not complete.exists() or complete.read_text() != " ".join(NEEDED):
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder / "environment"], check=True)
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        shared = folder / "environment" / "lib" / version / "site-packages" / "shared.pth"
        shared.write_text(f"{sysconfig.get_path('purelib')}\n")
        subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *NEEDED], check=True)
        complete.write_text(" ".join(NEEDED))
    return python


def fetch(suite: Suite, folder: Path, python: Path) -> Path:
    """The folder of a suite's files."""
    kept = folder / suite.release
    name = suite.release.partition("==")[0]
    if not (kept / "complete").exists():
        kind = ["--only-binary", ":all:"] if name == "sglang" else ["--no-binary", name]
        alone = ["--no-build-isolation"] if name == "vllm" else []  # else torch would be fetched to build metadata
        download = [python, "-m", "pip", "download", "-q", "--no-deps", *kind, *alone, "-d", kept, suite.release]
        subprocess.run(download, check=True, env=os.environ | suite.settings)
        [archive] = [each for each in kept.iterdir() if each.suffix in (".whl", ".gz")]
        wanted = re.compile(suite.kept)
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                wheel.extractall(kept, [name for name in wheel.namelist() if wanted.match(name)])
        else:
            with tarfile.open(archive) as source:
                source.extractall(kept, [each for each in source if wanted.match(each.name)], filter="data")
        for path in kept.rglob("*.py") if suite.replaced else ():  # the model is the one that is served
            text = path.read_text()
            for pattern, instead in suite.replaced:
                text = re.sub(pattern, instead, text, flags=re.MULTILINE)
            path.write_text(text)
        archive.unlink()
        (kept / "complete").touch()
    return kept


def main() -> int:
    """Returns pytest's exit code."""
    name, *arguments = sys.argv[1:]
    suite, folder = SUITES[name], sapwood_home() / "suites"
    folder.mkdir(parents=True, exist_ok=True)
    python = environment(folder)
    [where] = fetch(suite, folder, python).glob(suite.folder) if suite.folder != "." else [folder / suite.release]
    with_server = os.environ.get("SERVER")
    up = None
    if with_server is None:
        flags = [sys.executable, "-m", "sapwood.cli.main", "up", "--ports", "auto", "--workers", "1", "--threads", "1"]
        flags += ["--model", "demo-base", "--served-model-name", "demo"]
        up = subprocess.Popen(flags, stdout=subprocess.PIPE, text=True)
        assert up.stdout is not None
        with_server = next(f"http://{found[1]}" for line in up.stdout if (found := re.search(r"//([\d.:]+)/v1", line)))
        next(line for line in up.stdout if line.startswith("Ctrl-C"))
        threading.Thread(target=up.stdout.read, daemon=True).start()  # a full pipe would hold the server up
    paths = os.pathsep.join((str(HERE), str(where)))
    settings = {"SUITE": name, "SERVER": with_server, "PYTHONPATH": paths, "NO_PROXY": "127.0.0.1"}
    settings["DEMO"] = str(packaged_path("demo-base"))
    pytest = [python, "-m", "pytest", "-p", "suite_stub", "-c", os.devnull, "--rootdir", where, "-v", "--tb=short"]
    pytest += ["--timeout", "120", "-o", "asyncio_mode=auto", "-p", "no:cacheprovider", *suite.flags]
    try:
        return subprocess.run(
            [*pytest, *(arguments or suite.tests)], cwd=where, env=os.environ | settings, check=False
        ).returncode
    finally:
        if up is not None:
            up.terminate()
            up.wait()


if __name__ == "__main__":
    sys.exit(main())
