"""A headless Chromium, told what to do through its DevTools protocol over a pipe."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # tests run as root in containers
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-sync",
    "--no-first-run",
    "--no-proxy-server",
    "--window-size=1280,800",
)
_AT_3_AND_4 = """
import os, sys
read, write, *command = sys.argv[1:]
os.dup2(int(read), 3), os.dup2(int(write), 4)
os.execvp(command[0], command)
"""
"""Becomes a browser whose ends of the pipes are where it looks for them."""
_LONGEST_MESSAGE = 64 * 1024 * 1024


class Browser:
    """A running Chromium; its messages are JSON objects that end with a zero byte."""

    def __init__(self, process: asyncio.subprocess.Process, answers: asyncio.StreamReader, commands: int) -> None:
        self._process = process
        self._commands = commands
        self._answers = answers
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.events: list[dict[str, Any]] = []
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, profile: Path) -> Browser:
        name = next(filter(None, map(shutil.which, _BROWSERS)), None)
        if name is None:
            pytest.skip(
                f"no browser is installed: none of {', '.join(_BROWSERS)} (on Debian: apt-get install chromium)"
            )
        its_read, commands = os.pipe()
        answers, its_write = os.pipe()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _AT_3_AND_4, str(its_read), str(its_write)),
            *(name, *_FLAGS, f"--user-data-dir={profile}"),
            pass_fds=(its_read, its_write),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(its_read)
        os.close(its_write)
        reader = asyncio.StreamReader(_LONGEST_MESSAGE)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(answers, "rb", 0))
        return cls(process, reader, commands)

    async def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Runs a command; fails with what the browser says against it."""
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        said = await answer
        assert "error" not in said, (method, said["error"])
        return said["result"]

    async def open(self, url: str) -> Page:
        target = (await self.send("Target.createTarget", url="about:blank"))["targetId"]
        session = (await self.send("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        page = Page(self, target, session)
        for domain in ("Page", "Runtime", "Log"):
            await page.send(f"{domain}.enable")
        await page.go(url)
        return page

    async def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)
        await self._process.wait()
        self._reader.cancel()
        os.close(self._commands)

    async def _read(self) -> None:
        try:
            while True:
                message = json.loads((await self._answers.readuntil(b"\0"))[:-1])
                if "id" in message:
                    self._waiting.pop(message["id"]).set_result(message)
                else:
                    self.events.append(message)
        except asyncio.IncompleteReadError:
            for answer in self._waiting.values():
                answer.set_exception(ConnectionError("the browser has ended"))


class Page:
    """A tab."""

    def __init__(self, browser: Browser, target: str, session: str) -> None:
        self.browser = browser
        self.target = target
        self._session = session

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        return await self.browser.send(method, self._session, **parameters)

    async def go(self, url: str) -> None:
        await self.send("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def evaluate(self, script: str) -> Any:
        """What an expression is, awaited."""
        done = await self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    async def until(self, condition: str, seconds: float = 60.0) -> None:
        """Waits until an expression is true."""
        try:
            async with asyncio.timeout(seconds):
                while not await self.evaluate(f"Boolean({condition})"):
                    await asyncio.sleep(0.02)
        except TimeoutError:
            pytest.fail(f"never: {condition}\n{await self.evaluate('document.body.innerText')}\n{self.complaints()}")

    async def text(self, selector: str) -> str:
        """The visible text of an element."""
        return await self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")

    async def shows(self, selector: str, text: str) -> None:
        """Waits until some such element is visible and has that text in it."""
        found = f"[...document.querySelectorAll({json.dumps(selector)})]"
        await self.until(f"{found}.some((e) => e.checkVisibility() && e.innerText.includes({json.dumps(text)}))")

    async def hides(self, selector: str) -> None:
        """Waits until no such element is visible."""
        await self.until(f"![...document.querySelectorAll({json.dumps(selector)})].some((e) => e.checkVisibility())")

    async def click(self, selector: str) -> None:
        """Presses the mouse on an element, as soon as it is visible."""
        one = f"document.querySelector({json.dumps(selector)})"
        await self.until(f"{one}?.checkVisibility()")
        await self.evaluate(f"{one}.scrollIntoView({{block: 'center'}})")
        at = await self.evaluate(
            f"(({{x, y, width, height}}) => ({{x: x + width / 2, y: y + height / 2}}))({one}.getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.send("Input.dispatchMouseEvent", type=kind, **at, button="left", clickCount=1)

    async def press_button(self, within: str, name: str) -> None:
        """Presses the button of that name in the first such element, as soon as it is there."""
        found = f"[...(document.querySelector({json.dumps(within)})?.querySelectorAll('button') ?? [])]"
        found += f".find((e) => e.textContent === {json.dumps(name)} && e.checkVisibility())"
        await self.until(found)
        await self.evaluate(f"{found}.click()")

    async def phone(self) -> None:
        """From now on the screen is a phone's."""
        size = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
        await self.send("Emulation.setDeviceMetricsOverride", **size)

    async def dark(self) -> None:
        """From now on the reader likes dark pages."""
        await self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])

    async def reload(self) -> None:
        await self.send("Page.reload")

    async def write(self, selector: str, text: str) -> None:
        """Replaces a field's text as a keyboard would."""
        await self.until(f"document.querySelector({json.dumps(selector)})?.checkVisibility()")
        await self.evaluate(f"(e => (e.focus(), e.select()))(document.querySelector({json.dumps(selector)}))")
        await self.send("Input.insertText", text=text)

    async def press(self, key: str, code: int, text: str = "") -> None:
        """Presses a key where the focus is."""
        named = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        await self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **named)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **named)

    async def enter(self) -> None:
        await self.press("Enter", 13, "\r")

    async def screenshot(self, path: Path) -> None:
        shot = await self.send("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))  # noqa: ASYNC240 - small, and only for people

    def complaints(self) -> list[str]:
        """What the browser held against the page: exceptions, what its policy forbade, files that were not there."""
        told = []
        for event in self.browser.events:
            if event.get("sessionId") != self._session:
                continue
            if event["method"] == "Runtime.exceptionThrown":
                told.append(json.dumps(event["params"]["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] in ("error", "warning"):
                told.append(f"{event['params']['entry']['text']} {event['params']['entry'].get('url', '')}")
        return told


@pytest.fixture
async def browser(tmp_path: Path) -> AsyncIterator[Browser]:
    running = await Browser.start(tmp_path / "profile")
    try:
        yield running
    finally:
        await running.close()


@pytest.fixture
def shoot(request: pytest.FixtureRequest) -> Callable:
    """Takes a picture for people to look at, into the folder that SAPWOOD_SCREENSHOTS names; without it none."""

    async def take(page: Page, name: str) -> None:
        if folder := os.environ.get("SAPWOOD_SCREENSHOTS"):
            await page.screenshot(Path(folder) / f"{name}.png")

    return take
