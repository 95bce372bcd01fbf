"""What `sapwood up` offers to try is what can be run here; tests/e2e runs it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sapwood.cli import up
from sapwood.cli.local.cluster import Endpoints
from sapwood.cli.local.welcome import welcome
from sapwood.cli.main import build_parser


def test_programs_that_are_not_here_are_not_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    services = up._services(build_parser("up").parse_args(["up"]))
    endpoints = Endpoints("127.0.0.1:50051", "127.0.0.1:8000", "127.0.0.1:50052", ("127.0.0.1:50061",))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "openai", None)
    shown = welcome(services, endpoints, 1.0)
    assert "sapwood generate" in shown and "curl http://" in shown
    assert "grpcurl" not in shown and "import openai" not in shown

    program = tmp_path / "grpcurl"
    program.touch(mode=0o755)
    assert "  grpcurl -plaintext" in welcome(services, endpoints, 1.0)
    monkeypatch.setenv("PATH", "")  # it lies next to the interpreter only, as in a virtual environment
    assert f"  {program} -plaintext" in welcome(services, endpoints, 1.0)
