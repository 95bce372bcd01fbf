"""Stores of all kinds, new for each test."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from sapwood_router.store.opening import open_store
from sapwood_router.store.records import Retention, Store

LARGE = Retention(10**6, 10**12)


@pytest.fixture(params=["memory", "sqlite", "postgres", "redis"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty store."""
    if request.param == "postgres":
        return request.getfixturevalue("postgres_url")
    if request.param == "redis":
        return request.getfixturevalue("redis_url")
    return "memory" if request.param == "memory" else f"sqlite:{tmp_path}/store.sqlite"


@pytest.fixture
def open_one(store_url: str) -> Callable:
    """Opens the store; a context manager."""

    @contextlib.asynccontextmanager
    async def open_it(retention: Retention = LARGE) -> AsyncIterator[Store]:
        store = open_store(store_url, 0, retention)
        try:
            yield store
        finally:
            await store.close()

    return open_it
