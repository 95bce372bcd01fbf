"""A headless Chromium, driven through its DevTools protocol over a pipe."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

from sapwood_testing.browsers.page import PHONE, Browser, Page

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
_KEYS = {"Enter": (13, "\r"), "Tab": (9, ""), "Escape": (27, ""), "ArrowRight": (39, "")}
"""Each key's virtual code and the text that it writes."""
_CONTROLS = ("button", "textbox", "combobox", "checkbox", "link")


class Chromium(Browser):
    """A running Chromium; its messages are JSON objects that end with a zero byte."""

    NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    PACKAGE = "chromium"

    def __init__(self, process: asyncio.subprocess.Process, answers: asyncio.StreamReader, commands: int) -> None:
        self._process = process
        self._commands = commands
        self._answers = answers
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.events: list[dict[str, Any]] = []
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, profile: Path) -> Chromium:
        name = cls.command()
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
        result: dict[str, Any] = said["result"]
        return result

    async def open(self, url: str) -> Page:
        target = (await self.send("Target.createTarget", url="about:blank"))["targetId"]
        session = (await self.send("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        page = _Page(self, target, session)
        for domain in ("Page", "Runtime", "Log"):
            await page.send(f"{domain}.enable")
        await page.go(url)
        return page

    async def allow_clipboard(self, origin: str) -> None:
        await self.send("Browser.grantPermissions", permissions=["clipboardReadWrite"], origin=origin)

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


class _Page(Page):
    def __init__(self, browser: Chromium, target: str, session: str) -> None:
        self._browser = browser
        self._target = target
        self._session = session

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        return await self._browser.send(method, self._session, **parameters)

    async def go(self, url: str) -> None:
        await self.send("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def reload(self) -> None:
        await self.send("Page.reload")

    async def evaluate(self, script: str) -> Any:
        done = await self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    async def press_mouse(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            await self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def press(self, key: str) -> None:
        code, text = _KEYS[key]
        named = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        await self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **named)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **named)

    async def insert(self, text: str) -> None:
        await self.send("Input.insertText", text=text)

    async def phone(self) -> None:
        width, height = PHONE
        size = {"width": width, "height": height, "deviceScaleFactor": 2, "mobile": True}
        await self.send("Emulation.setDeviceMetricsOverride", **size)

    async def desktop(self) -> None:
        await self.send("Emulation.clearDeviceMetricsOverride")

    async def dark(self) -> None:
        await self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])

    async def to_front(self) -> None:
        await self._browser.send("Target.activateTarget", targetId=self._target)

    async def offline(self, on: bool) -> None:
        await self.send("Network.enable")
        line = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        await self.send("Network.emulateNetworkConditions", offline=on, **line)

    async def nameless_controls(self) -> tuple[int, list[str]]:
        tree = await self.send("Accessibility.getFullAXTree")
        nodes = [node for node in tree["nodes"] if not node["ignored"] and node["role"]["value"] in _CONTROLS]
        return len(nodes), [node["role"]["value"] for node in nodes if not node["name"]["value"].strip()]

    async def screenshot(self, path: Path) -> None:
        shot = await self.send("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))  # noqa: ASYNC240 - small, and only for people

    def complaints(self) -> list[str]:
        found = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            if event["method"] == "Runtime.exceptionThrown":
                found.append(json.dumps(event["params"]["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] in ("error", "warning"):
                found.append(f"{event['params']['entry']['text']} {event['params']['entry'].get('url', '')}")
        return found
