"""A pytest plugin that points the HTTP tests of other servers at a running Sapwood: their server fixtures start nothing.

It stands in for what those tests import of their own server. ``run_suite.py`` sets SUITE and SERVER.
"""

from __future__ import annotations

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
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import MagicMock
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest

SERVER = os.environ.get("SERVER", "")
os.environ.setdefault("TEST_API_BASE_URL", f"{SERVER}/v1")  # openai-python's tests ask there


_LEFT_OUT = "left out"


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


@cache
def _demo_tokenizer() -> Any:
    from transformers import AutoTokenizer

    demo = Path(os.environ["DEMO"])
    return AutoTokenizer.from_pretrained(str(demo.parent), gguf_file=demo.name)


def _tokenizer(*_: Any, **__: Any) -> Any:
    return _demo_tokenizer()


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
    tokenizers, config = _Absent("vllm.tokenizers"), _Absent("vllm.config")
    vars(tokenizers).update(get_tokenizer=_tokenizer)
    vars(config).update(ModelConfig=lambda **_: SimpleNamespace(get_vocab_size=lambda: len(_tokenizer())))
    sys.modules |= {"vllm.tokenizers": tokenizers, "vllm.config": config}


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


class _Asked:
    """The requests of openai-python's tests, made for a mock that takes everything.

    An answer that they ask for by a made-up id is made, so that it is there. An argument that is refused, and that
    ``suite_reasons.toml`` has a reason for, is left out, so that the others are tried. An answer without a bound gets one:
    they look at its type, and what the model writes may have no end.
    """

    bounds: ClassVar = {
        "/chat/completions": "max_completion_tokens",
        "/completions": "max_tokens",
        "/responses": "max_output_tokens",
        "/responses/compact": "max_output_tokens",
    }

    ids = re.compile(r"resp_677efb5139a88190b512bc3fef8e535d|(?<=/)response_id\b|\bresp_123\b|\bprevious_response_id\b")

    def __init__(self, refused: dict[str, str]) -> None:
        self._refused = refused
        self.left_out: set[str] = set()
        """Arguments that the test at hand was run without."""

    def prepare(self, options: Any) -> None:
        """Changes a request."""
        if self.ids.search(options.url):
            options.url = self.ids.sub(self._make_response(), options.url)
        body = options.json_data
        if isinstance(body, dict) and self.ids.fullmatch(str(body.get("previous_response_id", ""))):
            options.json_data = body = body | {"previous_response_id": self._make_response()}
        bound = {self.bounds[options.url]: 16} if options.url in self.bounds else {}
        while isinstance(body, dict) and (wrong := self._wrong(options.url, bound | body)) in self._refused:
            self.left_out.add(str(wrong))
            body = {name: value for name, value in body.items() if name != wrong}
        options.json_data = bound | body if isinstance(body, dict) and body else body

    def _make_response(self) -> str:
        asked = {"model": "demo", "input": "Hi", "max_output_tokens": 1, "background": True}
        response_id = str(json.loads(self._ask("POST", "/responses", asked))["id"])
        while b'"in_progress"' in self._ask("GET", f"/responses/{response_id}"):
            time.sleep(0.02)
        return response_id

    def _wrong(self, path: str, body: dict[str, Any]) -> str | None:
        if len(body) <= len(("model", "input", "a few more")):
            return None
        try:
            self._ask("POST", path, body)
        except HTTPError as error:
            return str(json.loads(error.read())["error"]["param"]).partition(".")[0]
        return None

    def _ask(self, method: str, path: str, body: object = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        with urlopen(Request(f"{SERVER}/v1{path}", data, headers, method=method)) as answer:
            return bytes(answer.read())


def _of_openai(asked: _Asked) -> None:
    import openai._base_client

    build = openai._base_client.BaseClient._build_request

    def build_request(self: Any, options: Any, **more: Any) -> Any:
        asked.prepare(options)
        return build(self, options, **more)

    openai._base_client.BaseClient._build_request = build_request  # type: ignore[method-assign]


class Outcome:
    """Counts what passed, and sorts the failures by whose they are and why.

    Args:
        suite: Its name.
    """

    def __init__(self, suite: str) -> None:
        known = tomllib.loads((Path(__file__).parent / "suite_reasons.toml").read_text())
        self._suite = suite
        self._known = [(re.compile(each["of"], re.DOTALL), each["whose"], each["why"]) for each in known[suite]]
        self.arguments = known.get("refused_arguments", {})
        self.asked = _Asked(self.arguments if suite == "openai" else {})

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        """Notes with a report what its test was run without."""
        report = yield
        report.user_properties += [(_LEFT_OUT, name) for name in sorted(self.asked.left_out)]
        self.asked.left_out.clear()
        return report

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Prints it."""
        stats, write = terminalreporter.stats, terminalreporter.write_line
        found: dict[tuple[str, str], list[str]] = {}
        for report in (*stats.get("failed", ()), *stats.get("error", ())):
            found.setdefault(self._reason(report), []).append(report.nodeid)
        terminalreporter.section("whose")
        for (whose, why), tests in sorted(found.items()):
            write(f"{len(tests):5} {whose}: {why}")
            for test in tests if whose == "unsorted" else ():
                write(f"        {test}")
        left_out = [
            name for report in stats.get("passed", ()) for kind, name in report.user_properties if kind == _LEFT_OUT
        ]
        for name in sorted(set(left_out)):
            write(f"{left_out.count(name):5} passed without {name}, which is refused: {self.arguments[name]}")
        counts = {kind: len(stats.get(kind, ())) for kind in ("passed", "skipped", "xfailed", "xpassed")}
        for (whose, _), tests in sorted(found.items()):
            counts[whose] = counts.get(whose, 0) + len(tests)
        write(f"{self._suite}: {', '.join(f'{count} {kind}' for kind, count in counts.items() if count)}")

    def _reason(self, report: Any) -> tuple[str, str]:
        told = f"{report.nodeid}\n{report.longrepr}"
        return next(((whose, why) for pattern, whose, why in self._known if pattern.search(told)), ("unsorted", ""))


OUTCOME = Outcome(os.environ["SUITE"])


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Lays the stand-ins, before anything is imported that needs them."""
    sys.meta_path.append(_Finder())
    if os.environ["SUITE"] == "vllm":
        _of_vllm()
    elif os.environ["SUITE"] == "llama.cpp":
        _of_llama_cpp()
    elif os.environ["SUITE"] == "openai":
        _of_openai(OUTCOME.asked)


def pytest_configure(config: pytest.Config) -> None:
    """Names the marks that tests have, and has the outcome printed."""
    for mark in ("cpu_model", "core_model", "skip_global_cleanup", "serial", "slow_test"):
        config.addinivalue_line("markers", mark)
    config.pluginmanager.register(OUTCOME)
