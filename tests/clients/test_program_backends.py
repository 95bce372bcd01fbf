"""Programs through a library that this environment does not have: LiteLLM's, which calls most providers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.clients, pytest.mark.timeout(1800)]

SCRIPT = Path(__file__).parent / "scripts/litellm_program.py"


def test_a_program_gives_through_litellm_what_it_gives_over_http(
    cluster: Any, make_environment: Any, run_client: Any, show_versions: Any
) -> None:
    programs = make_environment("litellm==1.106.2", shares=True)
    show_versions("litellm==1.106.2")
    one, other = json.loads(run_client(programs / "python", SCRIPT, f"http://{cluster.http}").splitlines()[-1])
    assert one == other and all(one)
