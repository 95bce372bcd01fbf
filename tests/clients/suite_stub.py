"""A pytest plugin that points the HTTP tests of other servers at a running Sapwood: their server fixtures start nothing.

It stands in for what those tests import of their own server. ``run_suite.py`` sets SUITE and SERVER.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import json
import os
import re
import sys
import time
import tomllib
import types
import unittest
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest

SERVER = os.environ.get("SERVER", "")
os.environ.setdefault("TEST_API_BASE_URL", f"{SERVER}/v1")  # openai-python's tests ask there


class _Absent(types.ModuleType):
    """A module of a server that is not installed: every name in it is a mock."""

    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "CustomTestCase":
            return unittest.TestCase
        if name.startswith("DEFAULT_TIMEOUT"):
            return 600
        return MagicMock(name=name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of absent servers, where nobody else does."""

    roots = ("vllm", "sglang", "vllm_test_utils", "schemathesis", "wget")

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".", maxsplit=1)[0] not in self.roots:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class RemoteOpenAIServer:
    """In place of vLLM's fixture: the server that runs, whatever it is asked to start."""

    DUMMY_API_KEY = "none"

    def __init__(self, *_: Any, **__: Any) -> None:
        parts = urlsplit(SERVER)
        self.host, self.port, self.url_root = parts.hostname, parts.port, SERVER
        self.uds = None

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def url_for(self, *parts: str) -> str:
        """The URL of a path."""
        return "/".join((SERVER, *parts))

    def get_client(self, **settings: Any) -> Any:
        """OpenAI's client."""
        import openai

        return openai.OpenAI(base_url=self.url_for("v1"), api_key=self.DUMMY_API_KEY, **{"max_retries": 0} | settings)

    def get_async_client(self, **settings: Any) -> Any:
        """OpenAI's asynchronous client."""
        import openai

        settings = {"max_retries": 0} | settings
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), api_key=self.DUMMY_API_KEY, **settings)

    def get_client_anthropic(self, **settings: Any) -> Any:
        """Anthropic's client."""
        import anthropic

        return anthropic.Anthropic(base_url=SERVER, api_key=self.DUMMY_API_KEY, **{"max_retries": 0} | settings)

    def get_async_client_anthropic(self, **settings: Any) -> Any:
        """Anthropic's asynchronous client."""
        import anthropic

        return anthropic.AsyncAnthropic(base_url=SERVER, api_key=self.DUMMY_API_KEY, **{"max_retries": 0} | settings)


def _tokenizer(*_: Any, **__: Any) -> Any:
    from transformers import AutoTokenizer

    from sapwood_common.models.model_files import demo_path

    return AutoTokenizer.from_pretrained(str(demo_path().parent), gguf_file=demo_path().name)


def _of_vllm() -> None:
    utils = _Absent("tests.utils")
    vars(utils).update(
        RemoteOpenAIServer=RemoteOpenAIServer,
        RemoteOpenAIServerCustom=RemoteOpenAIServer,
        RemoteAnthropicServer=RemoteOpenAIServer,
        create_new_process_for_each_test=lambda *_, **__: lambda test: test,
        multi_gpu_test=lambda **_: lambda test: test,
        large_gpu_test=lambda **_: lambda test: test,
    )
    sys.modules["tests.utils"] = utils
    tokenizers = _Absent("vllm.tokenizers")
    tokenizers.get_tokenizer = _tokenizer  # type: ignore[attr-defined]
    sys.modules["vllm.tokenizers"] = tokenizers


def _of_llama_cpp() -> None:
    import utils

    def start(self: Any, timeout_seconds: int = 0) -> None:
        parts = urlsplit(SERVER)
        self.server_host, self.server_port, self.ready = parts.hostname, parts.port, True
        self.process = MagicMock(pid=0)

    server = utils.ServerProcess
    server.start, server.stop = start, lambda self: None
    utils.ServerPreset.load_all = staticmethod(lambda: None)
    ask, stream, any_request = server.make_request, server.make_stream_request, server.make_any_request

    def named(data: Any) -> Any:
        return data | {"model": "demo"} if isinstance(data, dict) else data  # theirs serves one, whatever it is called

    server.make_request = lambda self, method, path, data=None, *args, **more: ask(
        self, method, path, named(data), *args, **more
    )
    server.make_stream_request = lambda self, method, path, data=None, *args, **more: stream(
        self, method, path, named(data), *args, **more
    )
    server.make_any_request = lambda self, method, path, data=None, *args, **more: any_request(
        self, method, path, named(data), *args, **more
    )


class _Kept:
    """Answers that openai-python's tests ask for by made-up ids: each time one is made that is there."""

    ids = re.compile(r"resp_677efb5139a88190b512bc3fef8e535d|(?<=/)response_id\b|\bresp_123\b|\bprevious_response_id\b")

    def make(self) -> str:
        """The id of a response."""
        asked = {"model": "demo", "input": "Hi", "max_output_tokens": 1, "background": True}
        response_id = str(self._ask("POST", "/v1/responses", asked)["id"])
        while self._ask("GET", f"/v1/responses/{response_id}")["status"] in ("queued", "in_progress"):
            time.sleep(0.02)
        return response_id

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        with urlopen(Request(SERVER + path, data, headers, method=method)) as answer:
            return json.load(answer)


def _of_openai() -> None:
    import openai._base_client

    kept, build = _Kept(), openai._base_client.BaseClient._build_request

    def build_request(self: Any, options: Any, **more: Any) -> Any:
        if kept.ids.search(options.url):
            options.url = kept.ids.sub(kept.make(), options.url)
        if isinstance(options.json_data, dict) and kept.ids.fullmatch(options.json_data.get("previous_response_id", "")):
            options.json_data = options.json_data | {"previous_response_id": kept.make()}
        return build(self, options, **more)

    openai._base_client.BaseClient._build_request = build_request  # type: ignore[method-assign]


class _Reasons:
    """Why tests fail: whose fault that is, and what it comes from."""

    def __init__(self, suite: str) -> None:
        known = tomllib.loads((Path(__file__).parent / "suite_reasons.toml").read_text())
        self._known = [(re.compile(each["of"], re.DOTALL), each["whose"], each["why"]) for each in known[suite]]

    def of(self, report: Any) -> tuple[str, str]:
        """Whose a failure is, and why."""
        told = f"{report.nodeid}\n{report.longrepr}"
        return next(((whose, why) for pattern, whose, why in self._known if pattern.search(told)), ("unsorted", ""))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Counts what passed, and the failures by their reasons."""
    reasons, stats = _Reasons(os.environ["SUITE"]), terminalreporter.stats
    sorted_by: dict[tuple[str, str], list[str]] = {}
    for report in (*stats.get("failed", ()), *stats.get("error", ())):
        sorted_by.setdefault(reasons.of(report), []).append(report.nodeid)
    write = terminalreporter.write_line
    terminalreporter.section("whose")
    for (whose, why), tests in sorted(sorted_by.items()):
        write(f"{len(tests):5} {whose}: {why}")
        for test in tests if whose == "unsorted" else ():
            write(f"        {test}")
    counts = {kind: len(stats.get(kind, ())) for kind in ("passed", "skipped", "xfailed", "xpassed")}
    for (whose, _), tests in sorted(sorted_by.items()):
        counts[whose] = counts.get(whose, 0) + len(tests)
    write(f"{os.environ['SUITE']}: {', '.join(f'{count} {kind}' for kind, count in counts.items() if count)}")


def pytest_configure(config: pytest.Config) -> None:
    """Lays the stand-ins."""
    sys.meta_path.append(_Finder())
    for mark in ("cpu_model", "core_model", "skip_global_cleanup", "serial", "slow_test"):
        config.addinivalue_line("markers", mark)
    with contextlib.suppress(KeyError):
        {"vllm": _of_vllm, "llama.cpp": _of_llama_cpp, "openai": _of_openai}[os.environ["SUITE"]]()
