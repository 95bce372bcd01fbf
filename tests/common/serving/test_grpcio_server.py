"""The services' own tests once more, with grpcio's server in all of them (``--grpc-server grpcio``)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2]
SELECTED = {
    "router": (
        "router/edges/grpc/test_grpc.py",
        "router/flow/test_cancellation.py",
        "router/flow/test_choices.py",
        "router/admission/test_tenants.py",
    ),
    "router's sessions": (
        "router/tokenizer/test_encode_session.py",
        "router/tokenizer/test_message_sizes.py",
        "router/transport/test_duplex_call.py",
    ),
    "tokenizer": ("tokenizer/serve/test_service.py",),
    "worker": ("worker/test_service.py", "worker/front/test_session.py", "worker/front/test_session_sizes.py"),
}


def test_the_selected_tests_are_there() -> None:
    assert [name for names in SELECTED.values() for name in names if not (TESTS / name).is_file()] == []


@pytest.mark.slow
@pytest.mark.parametrize("part", SELECTED)
def test_the_services_pass_the_same_tests(part) -> None:
    variables = {f"SAPWOOD_{service}_GRPC_SERVER": "grpcio" for service in ("ROUTER", "TOKENIZER", "WORKER")}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
    done = subprocess.run(
        command + [str(TESTS / name) for name in SELECTED[part]],
        cwd=TESTS.parent,
        env={**os.environ, **variables, "SHARD": ""},  # all of these tests, also where this one is of a shard
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
