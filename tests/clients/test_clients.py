"""Other people's clients, as their users install them, make their ordinary calls against the demo model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.clients, pytest.mark.timeout(1800)]

SCRIPTS = Path(__file__).parent / "scripts"
CLIENTS = {
    "openai": ("openai==3.54.0",),
    "anthropic": ("anthropic==2.10.0",),
    "langchain": ("langchain-openai==1.7.3",),
    "litellm": ("litellm==1.106.2", "mcp==2.3.0"),  # which it imports, and does not require, where there are tools
    "pydantic_ai": ("pydantic-ai-slim[openai]==2.68.0",),
    "openai_agents": ("openai-agents==0.24.0",),
    "instructor": ("instructor==1.17.0",),
    "llama_index": ("llama-index-llms-openai-like==0.8.1", "llama-index-embeddings-openai-like==0.4.0"),
    "dspy": ("dspy[numpy]==3.4.1", "mcp==2.3.0"),  # the second for litellm, which it calls
    "outlines": ("outlines==1.3.3", "openai==3.54.0"),
    "guidance": ("guidance==0.3.1", "openai==3.54.0"),
    "smolagents": ("smolagents[openai]==1.26.0",),
    "haystack": ("haystack-ai==3.4.1",),
    "autogen": ("autogen-ext[openai]==0.7.5", "autogen-agentchat==0.7.5"),
    "inspect": ("inspect-ai==0.3.285", "openai==3.57.0"),  # which it needs and does not require
}
PACKAGES = ("ai@7.0.173", "@ai-sdk/openai@4.0.118", "@ai-sdk/openai-compatible@3.0.92")


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_makes_its_ordinary_calls(
    cluster: Any, make_environment: Any, run_client: Any, show_versions: Any, client: str
) -> None:
    programs = make_environment(*CLIENTS[client])
    show_versions(*CLIENTS[client])
    out = run_client(programs / "python", SCRIPTS / f"{client}_calls.py", f"http://{cluster.http}/v1")
    assert out.splitlines()[-1] == "ok"


def test_the_vercel_sdk_makes_its_ordinary_calls(
    cluster: Any, make_packages: Any, run_client: Any, show_versions: Any
) -> None:
    script = make_packages(SCRIPTS / "vercel_calls.mjs", *PACKAGES)
    show_versions(*PACKAGES)
    assert run_client("node", script, f"http://{cluster.http}/v1").splitlines()[-1] == "ok"
