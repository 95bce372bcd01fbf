"""Other people's clients show a picture by their own helpers, and get the text that the model says to it."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sapwood_testing.models.vision_models import make_vision
from sapwood_testing.models.vision_prompts import picture
from tests.clients.test_clients import CLIENTS, PACKAGES, SCRIPTS

pytestmark = [pytest.mark.slow, pytest.mark.clients, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory, start_cluster_of: Any) -> Iterator[str]:
    model = make_vision("qwen2_5_vl", tmp_path_factory.mktemp("seeing") / "seeing")
    with start_cluster_of(str(model.path), "--workers", "1", "--worker-dtype", "float32") as running:
        yield f"http://{running.http}/v1"


@pytest.fixture
def shown(seeing: str, tmp_path: Path) -> tuple[str, Path, str]:
    """The API, a picture's file, and what the model says to it."""
    made = io.BytesIO()
    picture(0).save(made, "PNG")
    file = tmp_path / "picture.png"
    file.write_bytes(made.getvalue())
    link = f"data:image/png;base64,{base64.b64encode(made.getvalue()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": link}}, {"type": "text", "text": "What?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{seeing}/chat/completions", json=body, timeout=100, trust_env=False)
    text: str = answer.json()["choices"][0]["message"]["content"]
    assert text.strip()
    return seeing, file, text


def test_langchain_shows_a_picture(
    shown: tuple[str, Path, str], make_environment: Any, run_client: Any, show_versions: Any
) -> None:
    programs = make_environment(*CLIENTS["langchain"])
    show_versions(*CLIENTS["langchain"])
    out = run_client(programs / "python", SCRIPTS / "langchain_pictures.py", *shown)
    assert out.splitlines()[-1] == "ok"


def test_the_vercel_sdk_shows_a_picture(
    shown: tuple[str, Path, str], make_packages: Any, run_client: Any, show_versions: Any
) -> None:
    script = make_packages(SCRIPTS / "vercel_pictures.mjs", *PACKAGES)
    show_versions(*PACKAGES)
    assert run_client("node", script, *shown).splitlines()[-1] == "ok"
