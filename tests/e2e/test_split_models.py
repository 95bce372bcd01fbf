"""``sapwood up`` with workers whose model is split over processes: clients get the text of whole ones."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

PROMPTS = ["The capital of France is", "Once upon a time, in a village by the sea,", "Water boils at a temperature of"]


def answers(http: str) -> list[str]:
    """The greedy continuation of each prompt."""
    found = []
    with httpx.Client(base_url=f"http://{http}", trust_env=False, timeout=200) as client:
        for prompt in PROMPTS:
            body = {"prompt": prompt, "max_tokens": 16, "temperature": 0}
            found.append(client.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]["text"])
    return found


@pytest.mark.slow
@pytest.mark.model
def test_up_with_split_models_gives_the_text_of_whole_ones(cluster: Any, start_cluster_of: Any) -> None:
    expected = answers(cluster.http)
    assert all(expected)
    for split in ("--tensor-parallel", "--worker-pipeline-parallel"):
        with start_cluster_of("demo-base", "--workers", "1", split, "2") as running:
            assert answers(running.http) == expected
