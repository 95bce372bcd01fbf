"""What tests do in a browser, the same in every browser."""

from __future__ import annotations

import asyncio
import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

PHONE = (390, 844)
"""Width and height of a phone's screen, in CSS pixels."""
DESKTOP = (1280, 800)


class Browser(ABC):
    """A running browser with a profile of its own.

    Attributes:
        NAMES: Commands that may start it; the first that is installed does.
        PACKAGE: Debian's package that brings it.
    """

    NAMES: ClassVar[Sequence[str]]
    PACKAGE: ClassVar[str]

    @classmethod
    def command(cls) -> str:
        """The browser's command; skips the test where it is not installed."""
        name = next(filter(None, map(shutil.which, cls.NAMES)), None)
        if name is None:
            pytest.skip(f"not installed: {' or '.join(cls.NAMES)} (on Debian: apt-get install {cls.PACKAGE})")
        return name

    @classmethod
    @abstractmethod
    async def start(cls, profile: Path) -> Browser:
        """Starts it with an empty profile; skips the test where it is not installed."""

    @abstractmethod
    async def open(self, url: str) -> Page:
        """A new tab that has loaded this URL."""

    @abstractmethod
    async def allow_clipboard(self, origin: str) -> None:
        """Lets pages of this origin write and read the clipboard without a question."""

    @abstractmethod
    async def close(self) -> None:
        """Ends it."""


class Page(ABC):
    """A tab."""

    @abstractmethod
    async def go(self, url: str) -> None:
        """Loads a URL, wholly."""

    @abstractmethod
    async def reload(self) -> None: ...

    @abstractmethod
    async def evaluate(self, script: str) -> Any:
        """The value of an expression, awaited; fails with what it throws."""

    @abstractmethod
    async def press_mouse(self, x: float, y: float) -> None:
        """Presses the left button at a point of the viewport, in CSS pixels."""

    @abstractmethod
    async def press(self, key: str) -> None:
        """Presses a key where the focus is: Enter, Escape, Tab or an arrow, by its name in the DOM."""

    @abstractmethod
    async def insert(self, text: str) -> None:
        """Writes a text where the focus is, in place of what is selected."""

    @abstractmethod
    async def phone(self) -> None:
        """From now on the screen is a phone's."""

    @abstractmethod
    async def desktop(self) -> None:
        """From now on the screen is a desktop's again."""

    @abstractmethod
    async def dark(self) -> None:
        """From now on the reader likes dark pages."""

    @abstractmethod
    async def to_front(self) -> None:
        """Shows this tab, and hides the others."""

    @abstractmethod
    async def offline(self, on: bool) -> None:
        """Cuts the tab off from the network, or connects it again."""

    @abstractmethod
    async def nameless_controls(self) -> tuple[int, list[str]]:
        """How many controls readers of the screen find, and the roles of those without a name."""

    @abstractmethod
    async def screenshot(self, path: Path) -> None:
        """Writes a PNG of what is visible."""

    @abstractmethod
    def complaints(self) -> list[str]:
        """What the browser held against the page: exceptions, what its policy forbade, files that were not there."""

    async def until(self, condition: str, seconds: float = 60.0) -> None:
        """Waits until an expression is true."""
        try:
            async with asyncio.timeout(seconds):
                while not await self.evaluate(f"Boolean({condition})"):  # noqa: ASYNC110 - it is the browser that is asked
                    await asyncio.sleep(0.02)
        except TimeoutError:
            pytest.fail(f"never: {condition}\n{await self.evaluate('document.body.innerText')}\n{self.complaints()}")

    async def text(self, selector: str) -> str:
        """The visible text of an element."""
        found: str = await self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")
        return found

    async def shows(self, selector: str, text: str) -> None:
        """Waits until some such element is visible and has that text in it."""
        found = f"[...document.querySelectorAll({json.dumps(selector)})]"
        # A closed list's innerText is empty in Firefox.
        said = "(e.localName === 'select' ? e.textContent : e.innerText)"
        await self.until(f"{found}.some((e) => e.checkVisibility() && {said}.includes({json.dumps(text)}))")

    async def hides(self, selector: str) -> None:
        """Waits until no such element is visible."""
        await self.until(f"![...document.querySelectorAll({json.dumps(selector)})].some((e) => e.checkVisibility())")

    async def click(self, selector: str) -> None:
        """Presses the mouse on an element, as soon as it is visible."""
        one = f"document.querySelector({json.dumps(selector)})"
        await self.until(f"{one}?.checkVisibility()")
        await self.evaluate(f"{one}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        at = await self.evaluate(
            f"(({{x, y, width, height}}) => ({{x: x + width / 2, y: y + height / 2}}))({one}.getBoundingClientRect())"
        )
        await self.press_mouse(at["x"], at["y"])

    async def press_button(self, within: str, name: str) -> None:
        """Presses the button of that name in the first such element, as soon as it is there."""
        found = f"[...(document.querySelector({json.dumps(within)})?.querySelectorAll('button') ?? [])]"
        found += f".find((e) => e.textContent === {json.dumps(name)} && e.checkVisibility())"
        await self.until(found)
        await self.evaluate(f"{found}.click()")

    async def write(self, selector: str, text: str) -> None:
        """Replaces a field's text as a keyboard would."""
        await self.until(f"document.querySelector({json.dumps(selector)})?.checkVisibility()")
        await self.evaluate(f"(e => (e.focus(), e.select()))(document.querySelector({json.dumps(selector)}))")
        await self.insert(text)

    async def enter(self) -> None:
        await self.press("Enter")
