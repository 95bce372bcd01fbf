"""Other people's clients, as their users install them, make their ordinary calls against the demo model."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.clients, pytest.mark.timeout(1800)]

SCRIPTS = Path(__file__).parent / "scripts"
CLIENTS = {
    "openai": ("openai==3.54.0",),
    "langchain": ("langchain-openai==1.7.3",),
    "litellm": ("litellm==1.106.2", "mcp==2.3.0"),  # which it imports, and does not require, where there are tools
    "pydantic_ai": ("pydantic-ai-slim[openai]==2.68.0",),
}
# Neither telemetry, nor lists of models from elsewhere, nor a hub.
QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "OMP_NUM_THREADS": "1"}


def run(*command: object) -> str:
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()} | QUIET
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env=environment, timeout=1500, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_makes_its_ordinary_calls(cluster: Any, make_environment: Any, client: str) -> None:
    programs = make_environment(*CLIENTS[client])
    out = run(programs / "python", SCRIPTS / f"{client}_calls.py", f"http://{cluster.http}/v1")
    assert out.splitlines()[-1] == "ok"


@pytest.mark.parametrize(
    ("path", "profile"),
    [("/v1/chat/completions", "kind=concurrent,streams=2"), ("/v1/completions", "kind=synchronous")],
)
def test_guidellm_measures(cluster: Any, make_environment: Any, tmp_path: Path, path: str, profile: str) -> None:
    programs = make_environment("guidellm==0.8.1", shares=True)
    data, report = tmp_path / "data.jsonl", tmp_path / "report.json"
    rows = [{"prompt": f"Question {number}: what is", "output_tokens_count": 4} for number in range(4)]
    data.write_text("\n".join(map(json.dumps, rows)))
    run(
        *(programs / "guidellm", "run", "--disable-console", "--profile", profile),
        *("--backend", f"kind=openai_http,target=http://{cluster.http},request_format={path}"),
        *("--constraint", "kind=max_requests,count=4", "--data", f"kind=json_file,path={data}"),
        *("--output", f"kind=json,path={report}"),
    )
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    found = {kind: len(requests) for kind, requests in benchmark["requests"].items() if kind != "total"}
    # On a busy machine it may end before its last request is reported.
    assert found.pop("successful") in (3, 4)
    assert found == {"incomplete": 0, "errored": 0}
