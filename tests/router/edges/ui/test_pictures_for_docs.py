"""The pictures in docs/ui.md, over a real model.

SAPWOOD_SCREENSHOTS=docs pytest -m slow tests/router/edges/ui/test_pictures_for_docs.py makes them.
"""

from __future__ import annotations

import asyncio
import threading

import pytest

import sapwood

pytestmark = pytest.mark.slow

QUESTIONS = (
    "What is the capital of France?",
    "What is the capital of Italy?",
    "Write a function that adds two numbers.",
)


def load(server: sapwood.Server) -> None:
    """Some conversations that begin alike."""
    with server.client() as client:
        for round_number in range(4):
            for question in QUESTIONS:
                system = (
                    "You are a helpful assistant. Answer in one sentence, and say so if you do not know the answer."
                )
                turns = [
                    {"role": "system", "content": system},
                    {"role": "user", "content": question + " " * round_number},
                ]
                client.generate(messages=turns, max_tokens=24, temperature=0).text()


def keep_loaded(server: sapwood.Server, enough: threading.Event) -> None:
    """One such load after another: a line in a chart takes two samples that follow each other."""
    while not enough.is_set():
        load(server)


async def test_each_view_shows_a_real_model_at_work(browser, shoot) -> None:
    server = await asyncio.to_thread(sapwood.Server("demo", workers=2).__enter__)
    try:
        page = await browser.open(f"{server.openai_base_url.removesuffix('/v1')}/ui/")
        await page.shows("#model-hint", "small enough")
        await asyncio.to_thread(load, server)
        await page.write("#max_tokens", "48")
        await page.write("#temperature", "0")
        await page.click("#logprobs")
        await page.write("#text", "What is the capital of France?")
        await page.enter()
        await page.shows(".turn.assistant .actions", "Tokens")
        await page.press_button(".turn.assistant", "Tokens")
        await page.evaluate("document.querySelector('.tokens').focus()")
        for _ in range(4):
            await page.press("ArrowRight")
        await page.shows("#token-tip", "%")
        await shoot(page, "ui-chat")
        await page.evaluate("location.hash = 'trace'")
        await page.shows(".bars", "generates")
        await shoot(page, "ui-trace")
        await page.evaluate("location.hash = 'cache'")
        await page.until("document.querySelectorAll('.node').length > 2")
        await shoot(page, "ui-cache")
        await page.evaluate("location.hash = 'fleet'")
        enough = threading.Event()
        loading = asyncio.create_task(asyncio.to_thread(keep_loaded, server, enough))
        try:
            await page.until("document.querySelector('.charts .line.together')?.getAttribute('d').includes('L')")
        finally:
            enough.set()
            await loading
        assert await page.evaluate("document.documentElement.scrollHeight <= innerHeight")  # one scroll bar, not two
        await shoot(page, "ui")
        assert page.complaints() == []
    finally:
        await asyncio.to_thread(server.__exit__, None, None, None)
