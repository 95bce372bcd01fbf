"""The browsers in which the page is tried."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from sapwood_testing.browsers.chromium import Chromium
from sapwood_testing.browsers.firefox import Firefox
from sapwood_testing.browsers.page import Browser, Page


@pytest.fixture(params=[Chromium, Firefox], ids=["chromium", "firefox"])
async def browser(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Browser]:
    kind: type[Browser] = request.param
    running = await kind.start(tmp_path / "profile")
    try:
        yield running
    finally:
        await running.close()


@pytest.fixture
def shoot(request: pytest.FixtureRequest) -> Callable:
    """Takes a picture for people to look at, into the folder that SAPWOOD_SCREENSHOTS names; without it none.

    Pictures of Firefox have its name before theirs.
    """
    browser = request.getfixturevalue("browser")

    async def take(page: Page, name: str) -> None:
        if folder := os.environ.get("SAPWOOD_SCREENSHOTS"):
            before = "firefox-" if isinstance(browser, Firefox) else ""
            await page.screenshot(Path(folder) / f"{before}{name}.png")

    return take
