"""A headless Firefox, driven through WebDriver BiDi over a WebSocket."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
from pathlib import Path
from typing import Any

import aiohttp

from sapwood_testing.browsers.page import DESKTOP, PHONE, Browser, Page

_FLAGS = ("--headless", "--no-remote", "--remote-debugging-port=0", "--remote-allow-system-access")
_SETTINGS = {
    "browser.aboutConfig.showWarning": False,
    "browser.shell.checkDefaultBrowser": False,
    "browser.startup.page": 0,
    "datareporting.policy.dataSubmissionEnabled": False,
    "dom.events.testing.asyncClipboard": True,  # a page reads the clipboard without a question
    "network.captive-portal-service.enabled": False,
    "network.connectivity-service.enabled": False,
    "network.proxy.type": 0,
    "app.normandy.enabled": False,
    "app.update.disabledForTesting": True,
    "extensions.update.enabled": False,
    "security.sandbox.content.level": 0,  # tests run as root in containers
    "services.settings.server": "data:,#remote-settings-dummy/v1",
    "toolkit.telemetry.server": "data:,",
}
_EVENTS = ("log.entryAdded", "network.responseCompleted", "network.fetchError")
_KEYS = {"Enter": "\ue007", "Tab": "\ue004", "Escape": "\ue00c", "ArrowRight": "\ue014"}
_CONTROLS = ("button", "textbox", "combobox", "checkbox", "link")
_SAY_WHAT_IS_FORBIDDEN = """() => addEventListener("securitypolicyviolation", (event) =>
  console.error(`${event.effectiveDirective} forbids ${event.blockedURI}`))"""
"""Firefox tells drivers nothing of its own of what a page's policy forbids."""
_ABORTED = "NS_BINDING_ABORTED"
"""The page itself gave up a request."""
_LONGEST_MESSAGE = 64 * 1024 * 1024


class Firefox(Browser):
    """A running Firefox."""

    NAMES = ("firefox-esr", "firefox")
    PACKAGE = "firefox-esr"

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        session: aiohttp.ClientSession,
        socket: aiohttp.ClientWebSocketResponse,
    ) -> None:
        self._process = process
        self._session = session
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.events: list[dict[str, Any]] = []
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, profile: Path) -> Firefox:
        name = cls.command()
        _write_settings(profile)
        process = await asyncio.create_subprocess_exec(
            *(name, *_FLAGS, "--profile", str(profile), "about:blank"),
            env={**os.environ, "HOME": str(profile), "MOZ_CRASHREPORTER_DISABLE": "1"},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        session = aiohttp.ClientSession()
        try:
            async with asyncio.timeout(120):
                url = await _address(profile, process)
                socket = await session.ws_connect(url, max_msg_size=_LONGEST_MESSAGE)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            await process.wait()
            await session.close()
            raise
        browser = cls(process, session, socket)
        await browser.send(
            "session.new", capabilities={"alwaysMatch": {"unhandledPromptBehavior": {"default": "dismiss"}}}
        )
        await browser.send("session.subscribe", events=list(_EVENTS))
        await browser.send("script.addPreloadScript", functionDeclaration=_SAY_WHAT_IS_FORBIDDEN)
        return browser

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Runs a command; fails with what the browser says against it."""
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_str(json.dumps({"id": number, "method": method, "params": parameters}))
        said = await answer
        assert said["type"] == "success", (method, said)
        result: dict[str, Any] = said["result"]
        return result

    async def open(self, url: str) -> Page:
        made = await self.send("browsingContext.create", type="tab")
        page = _Page(self, made["context"])
        await page.desktop()
        await page.go(url)
        return page

    async def allow_clipboard(self, origin: str) -> None:
        """Nothing: its settings allow it to every page."""

    async def run_inside(self, script: str) -> None:
        """Runs an expression with the rights of the browser itself."""
        windows = await self.send("browsingContext.getTree", **{"moz:scope": "chrome"})
        target = {"context": windows["contexts"][0]["context"]}
        done = await self.send("script.evaluate", expression=script, target=target, awaitPromise=True)
        assert done["type"] == "success", done

    async def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)
        await self._process.wait()
        self._reader.cancel()
        await self._socket.close()
        await self._session.close()

    async def _read(self) -> None:
        async for received in self._socket:
            message = json.loads(received.data)
            if message.get("id") is not None:
                self._waiting.pop(message["id"]).set_result(message)
            else:
                self.events.append(message)
        for answer in self._waiting.values():
            answer.set_exception(ConnectionError("the browser has ended"))


def _write_settings(profile: Path) -> None:
    profile.mkdir()
    lines = [f"user_pref({json.dumps(key)}, {json.dumps(value)});\n" for key, value in _SETTINGS.items()]
    (profile / "user.js").write_text("".join(lines))


async def _address(profile: Path, process: asyncio.subprocess.Process) -> str:
    """Where the browser listens, once it has written that into its profile."""
    while (url := _written_address(profile)) is None:
        assert process.returncode is None, f"Firefox ended with {process.returncode}"
        await asyncio.sleep(0.05)
    return url


def _written_address(profile: Path) -> str | None:
    try:
        said = json.loads((profile / "WebDriverBiDiServer.json").read_text())
    except (OSError, ValueError):
        return None
    return f"ws://{said['ws_host']}:{said['ws_port']}/session"


class _Page(Page):
    def __init__(self, browser: Firefox, context: str) -> None:
        self._browser = browser
        self._context = context

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        return await self._browser.send(method, context=self._context, **parameters)

    async def go(self, url: str) -> None:
        await self.send("browsingContext.navigate", url=url, wait="complete")

    async def reload(self) -> None:
        await self.send("browsingContext.reload", wait="complete")

    async def evaluate(self, script: str) -> Any:
        # As JSON, which is how Chromium returns values. The page's policy allows no eval; the driver needs none.
        declared = f"async () => JSON.stringify(await ({script}))"
        done = await self._browser.send(
            "script.callFunction",
            functionDeclaration=declared,
            target={"context": self._context},
            awaitPromise=True,
            userActivation=True,
        )
        assert done["type"] == "success", done["exceptionDetails"]["text"]
        value = done["result"].get("value")
        return None if value is None else json.loads(value)

    async def press_mouse(self, x: float, y: float) -> None:
        await self._act(
            "pointer",
            {"type": "pointerMove", "x": round(x), "y": round(y)},
            {"type": "pointerDown", "button": 0},
            {"type": "pointerUp", "button": 0},
        )

    async def press(self, key: str) -> None:
        await self._act("key", {"type": "keyDown", "value": _KEYS[key]}, {"type": "keyUp", "value": _KEYS[key]})

    async def insert(self, text: str) -> None:
        command = f"'insertText', false, {json.dumps(text)}" if text else "'delete'"
        await self.evaluate(f"document.execCommand({command})")

    async def phone(self) -> None:
        await self._screen(PHONE)

    async def desktop(self) -> None:
        await self._screen(DESKTOP)

    async def dark(self) -> None:
        await self._browser.run_inside(
            "for (const each of gBrowser.browsers) each.browsingContext.prefersColorSchemeOverride = 'dark'"
        )

    async def to_front(self) -> None:
        await self.send("browsingContext.activate")

    async def offline(self, on: bool) -> None:
        conditions = {"type": "offline"} if on else None
        await self._browser.send(
            "emulation.setNetworkConditions", networkConditions=conditions, contexts=[self._context]
        )

    async def nameless_controls(self) -> tuple[int, list[str]]:
        count, nameless = 0, []
        for role in _CONTROLS:
            for value in ({"role": role}, {"role": role, "name": ""}):
                found = await self.send(
                    "browsingContext.locateNodes", locator={"type": "accessibility", "value": value}
                )
                if "name" in value:
                    nameless += [role] * len(found["nodes"])
                else:
                    count += len(found["nodes"])
        return count, nameless

    async def screenshot(self, path: Path) -> None:
        shot = await self.send("browsingContext.captureScreenshot")
        path.write_bytes(base64.b64decode(shot["data"]))  # noqa: ASYNC240 - small, and only for people

    def complaints(self) -> list[str]:
        found = []
        for event in self._browser.events:
            method, said = event["method"], event["params"]
            if method == "log.entryAdded":
                if said["source"].get("context") == self._context and said["level"] in ("error", "warn"):
                    found.append(said["text"])
            elif said["context"] == self._context:
                if method == "network.fetchError" and said["errorText"] != _ABORTED:
                    found.append(f"{said['errorText']} {said['request']['url']}")
                elif method == "network.responseCompleted" and said["response"]["status"] >= 400:
                    found.append(f"{said['response']['status']} {said['request']['url']}")
        return found

    async def _act(self, kind: str, *actions: dict[str, Any]) -> None:
        await self.send("input.performActions", actions=[{"type": kind, "id": kind, "actions": list(actions)}])

    async def _screen(self, size: tuple[int, int]) -> None:
        await self.send("browsingContext.setViewport", viewport={"width": size[0], "height": size[1]})
