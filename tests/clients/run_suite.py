"""Runs another server's own HTTP tests against the demo model: ``python tests/clients/run_suite.py vllm [ARGUMENTS OF PYTEST]``.

The suite is fetched from PyPI into SAPWOOD_HOME, together with an environment for it, and is never part of this repository.
Names: sglang (its kits), llama.cpp (its server's tests), vllm (its tests of entrypoints over HTTP).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

from sapwood_common.models.model_files import sapwood_home

HERE = Path(__file__).parent
RELEASES = {"sglang": "sglang==0.5.23", "llama.cpp": "llama-cpp-python==0.3.36", "vllm": "vllm==0.33.0"}
NEEDED = (
    *("openai==3.54.0", "anthropic==2.10.0", "requests", "filelock", "pytest-timeout", "pytest-asyncio", "wget"),
    *("setuptools>=77", "setuptools_rust", "setuptools_scm", "wheel", "regex", "partial-json-parser", "jsonschema"),
    *("pybase64", "fastapi"),
)
KEPT = {
    "sglang": r"sglang/test/kits/\w+\.py$",
    "llama.cpp": r"[^/]+/vendor/llama\.cpp/tools/server/tests/",
    "vllm": r"[^/]+/tests/(entrypoints/|__init__\.py|entrypoints\b)",
}
# Of vLLM those of text over HTTP: the others start processes of their own, or are about modules of vLLM.
VLLM = (
    *(
        "anthropic/test_messages.py",
        "openai/chat_completion/test_chat.py",
        "openai/chat_completion/test_chat_completion.py",
    ),
    *("openai/chat_completion/test_chat_logit_bias_validation.py", "openai/chat_completion/test_chat_echo.py"),
    *("openai/chat_completion/test_completion_with_function_calling.py", "openai/completion/test_completion.py"),
    *(
        "openai/completion/test_prompt_validation.py",
        "openai/responses/test_simple.py",
        "openai/responses/test_basic.py",
    ),
    *("openai/responses/test_stateful.py", "openai/responses/test_structured_output.py"),
    *("openai/test_return_token_ids.py", "openai/test_return_tokens_as_ids.py", "openai/test_stop_token_ids.py"),
    *("openai/models/test_models.py", "serve/tokenize/test_tokenization.py", "serve/instrumentator/test_basic.py"),
    *("openai/chat_completion/test_include_reasoning.py", "openai/chat_completion/test_extra_content_fields.py"),
    *("openai/chat_completion/test_non_object_body_validation.py", "openai/test_session_id.py"),
)


def environment(folder: Path) -> Path:
    """The Python of the suites: our packages, and those that the tests need."""
    python = folder / "environment" / "bin" / "python"
    if not (folder / "environment" / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder / "environment"], check=True)
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        shared = folder / "environment" / "lib" / version / "site-packages" / "shared.pth"
        shared.write_text(f"{sysconfig.get_path('purelib')}\n")
        subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *NEEDED], check=True)
        (folder / "environment" / "complete").touch()
    return python


def fetch(suite: str, folder: Path, python: Path) -> Path:
    """The folder of a suite's files."""
    kept = folder / RELEASES[suite]
    if not (kept / "complete").exists():
        kind = ["--only-binary", ":all:"] if suite == "sglang" else ["--no-binary", RELEASES[suite].partition("==")[0]]
        alone = ["--no-build-isolation"] if suite == "vllm" else []  # else torch would be fetched to build metadata
        settings = {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": RELEASES["vllm"].partition("==")[2]}
        download = [python, "-m", "pip", "download", "-q", "--no-deps", *kind, *alone, "-d", kept, RELEASES[suite]]
        subprocess.run(download, check=True, env=os.environ | settings)
        [archive] = [each for each in kept.iterdir() if each.suffix in (".whl", ".gz")]
        wanted = re.compile(KEPT[suite])
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                wheel.extractall(kept, [name for name in wheel.namelist() if wanted.match(name)])
        else:
            with tarfile.open(archive) as source:
                source.extractall(kept, [each for each in source if wanted.match(each.name)], filter="data")
        for path in kept.rglob("*.py") if suite == "vllm" else ():  # the model is the one that is served
            text = re.sub(r'(?m)^(MODEL_NAME|MODEL) = ".*"$', r'\1 = "demo"', path.read_text())
            path.write_text(text.replace('"claude-3-7-sonnet-latest"', '"demo"'))
        archive.unlink()
        (kept / "complete").touch()
    return kept


def main() -> int:
    """Returns pytest's exit code."""
    suite, *arguments = sys.argv[1:]
    folder = sapwood_home() / "suites"
    folder.mkdir(parents=True, exist_ok=True)
    python = environment(folder)
    kept = fetch(suite, folder, python)
    if suite == "sglang":
        where, tests = kept, [str(HERE / "suite_sglang.py")]
    elif suite == "vllm":
        [where] = kept.glob("vllm-*")
        tests = [f"tests/entrypoints/{each}" for each in VLLM]
    else:
        [where] = kept.glob("*/vendor/llama.cpp/tools/server/tests")
        tests = ["unit"]
    with_server = os.environ.get("SERVER")
    flags = ["up", "--ports", "auto", "--workers", "1"]
    up = None
    if with_server is None:
        up = subprocess.Popen([sys.executable, "-m", "sapwood.cli.main", *flags], stdout=subprocess.PIPE, text=True)
        assert up.stdout is not None
        with_server = next(f"http://{found[1]}" for line in up.stdout if (found := re.search(r"//([\d.:]+)/v1", line)))
        next(line for line in up.stdout if line.startswith("Ctrl-C"))
    paths = os.pathsep.join((str(HERE), str(where)))
    settings = {"SUITE": suite, "SERVER": with_server, "PYTHONPATH": paths, "NO_PROXY": "127.0.0.1"}
    pytest = [python, "-m", "pytest", "-p", "suite_stub", "-c", os.devnull, "--rootdir", where, "-v", "--tb=short"]
    pytest += ["--timeout", "60", "-o", "asyncio_mode=auto", "-p", "no:cacheprovider", "--import-mode=importlib"]
    if suite != "sglang":
        pytest[pytest.index("--import-mode=importlib")] = "--import-mode=prepend"
    if suite != "llama.cpp":
        pytest += ["--noconftest"]
    try:
        return subprocess.run(
            [*pytest, *(arguments or tests)], cwd=where, env=os.environ | settings, check=False
        ).returncode
    finally:
        if up is not None:
            up.terminate()
            up.wait()


if __name__ == "__main__":
    sys.exit(main())
