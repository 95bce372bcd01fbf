"""Routers in front of backends: others of our own, whose edges are real, and servers that misbehave."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

ANSWER = "abcdefghijklmnopqrstuvwxyz"


def go_on(prompt: Any) -> list[int]:
    """A fake worker's script: of ANSWER what comes after that of it which follows the last ``:`` or ``>`` of the prompt."""
    said = bytes(token - 3 for token in prompt if token >= 3).decode()
    begun = said[max(said.rfind(":"), said.rfind(">")) + 1 :]
    assert ANSWER.startswith(begun), said
    return [ord(letter) + 3 for letter in ANSWER[len(begun) :]]


@pytest.fixture
def make_own(make_cluster: Callable) -> Callable:
    """A cluster of our own to be a backend; its model is called fake, and it answers ANSWER."""

    @contextlib.asynccontextmanager
    async def make() -> AsyncIterator[Any]:
        async with make_cluster(workers=1) as own:
            own.workers[0].script.tokens = go_on
            yield own

    return make


@pytest.fixture
def make_front(make_cluster: Callable) -> Callable:
    """A router that has nothing but backends, which are given as URLs or as ``--backends`` has them."""

    def make(*backends: str, **settings: Any) -> Any:
        given = tuple(text if text.startswith("url=") else f"url={text},name=m" for text in backends)
        return make_cluster(workers=0, backends=given, **{"backend_interval": 0.5, **settings})

    return make


def ended(front: Any) -> dict[str, int]:
    """How many requests ended with which status, as the router counted them."""
    found: dict[str, int] = {}
    for family in front.router._metrics.registry.collect():
        for sample in family.samples:
            if sample.name == "sapwood_router_requests_total" and sample.value:
                code = sample.labels["code"]
                found[code] = found.get(code, 0) + int(sample.value)
    return found
