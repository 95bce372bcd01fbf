"""The page in a real browser, over a router with scripted workers."""

from __future__ import annotations

import asyncio
import json

import pytest

from sapwood_common.errors import InternalError
from sapwood_common.tenants.api_keys import hash_key, make_key
from sapwood_testing.router.fake_tokenizer import encode
from sapwood_testing.router.script import Script

pytestmark = pytest.mark.slow

HOSTILE = "<script>window.hurt = 1</script><img src=x onerror='window.hurt = 1'>[a](javascript:window.hurt=1)"
ANSWER = f"""<think>The user wants **a list**.</think>Here is *what* you asked for: **two** things.

1. `first`
2. second
   - deeper

```python
print("hello")
```

{HOSTILE}"""
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}}


def says(cluster, text: str) -> None:
    """Lets each worker answer so."""
    for worker in cluster.workers:
        worker.script.tokens = lambda _: encode(text)[1:]


async def ask(page, text: str) -> None:
    await page.write("#text", text)
    await page.enter()


async def test_a_chat_streams_and_no_text_of_it_is_markup(make_cluster, browser, wait_until, shoot) -> None:
    async with make_cluster(2) as cluster:
        page = await browser.open(f"{cluster.url}/ui")
        says(cluster, ANSWER)
        gate = asyncio.Event()
        for worker in cluster.workers:
            worker.script.gate, worker.script.gate_after = gate, ANSWER.encode().index(b"second")
        await page.shows("#model", "fake")
        await page.write("#system", "Be brief.")
        await page.write("#temperature", "0.5")
        await page.write("#max_tokens", "1000")
        await page.write("#seed", "7")
        await ask(page, HOSTILE)
        await page.shows(".turn.assistant li code", "first")  # it streams: the workers have not said all of it
        await page.shows("#stop", "Stop")
        assert await page.evaluate("document.querySelector('.turn.assistant').getAttribute('aria-busy')") == "true"
        gate.set()
        await page.shows(".turn.assistant .actions", "Retry")
        await page.hides("#stop")
        (call,) = cluster.calls()
        sampling = call.request.sampling
        assert (sampling.temperature, sampling.max_tokens, sampling.seed) == (0.5, 1000, 7)
        (chat,) = cluster.tokenizer.chats
        said = [("system", "Be brief."), ("user", HOSTILE)]
        assert [(message.role, message.content) for message in chat.messages] == said
        for shown in ("strong", "em", "li ul li", ".code-block pre"):
            assert await page.evaluate(f"Boolean(document.querySelector('.turn.assistant .text {shown}'))"), shown
        assert await page.text(".turn.assistant .code-block pre") == 'print("hello")'
        assert HOSTILE in await page.text(".turn.assistant .text")
        assert HOSTILE in await page.text(".turn.user .text")
        assert not await page.evaluate("'hurt' in window")
        assert await page.evaluate("document.querySelectorAll('#log :is(script, img, a, iframe)').length") == 0
        await page.hides(".turn.assistant .thoughts")  # folded until it is asked for
        await page.click(".turn.assistant .reasoning summary")
        await page.shows(".turn.assistant .thoughts", "The user wants **a list**.")
        stats = await page.text(".turn.assistant .stats")
        for told in ("prompt tokens", "s to the first", "tokens/s", f"{len(ANSWER.encode()) + 1} tokens"):
            assert told in stats
        await shoot(page, "chat-light")
        await page.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
        await shoot(page, "chat-dark")
        size = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
        await page.send("Emulation.setDeviceMetricsOverride", **size)
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        await page.send("Page.reload")
        await page.shows(".turn.assistant .text", "deeper")  # the tab keeps the conversation,
        await shoot(page, "chat-phone")
        assert await page.evaluate("document.querySelector('#temperature').value") == "0.5"
        await ask(page, "And now?")
        await wait_until(lambda: len(cluster.tokenizer.chats) == 2)
        roles = [message.role for message in cluster.tokenizer.chats[1].messages]
        assert roles == ["system", "user", "assistant", "user"]  # which continues
        assert page.complaints() == []


async def test_what_a_model_repeats_without_end_does_not_keep_the_browser(make_cluster, browser) -> None:
    async with make_cluster(1) as cluster:
        page = await browser.open(f"{cluster.url}/ui/")
        cluster.workers[0].script.chunk = 2000
        nested = "".join(f"{' ' * depth}- deeper\n" for depth in range(60))
        for text in ("x" + "`" * 15000, "x" + "*" * 15000, "x **`" * 3000, "*x " * 5000, nested, "```" + "`x\n" * 900):
            says(cluster, text + " and that is all")
            await ask(page, "go on")
            await page.shows(".turn.assistant:last-child .text", "and that is all")
            await page.shows(".turn.assistant:last-child .actions", "Retry")
            await page.click("#clear")
        assert page.complaints() == []


async def test_an_answer_can_be_copied_also_where_the_browser_has_no_clipboard_for_pages(make_cluster, browser) -> None:
    async with make_cluster(1) as cluster:
        page = await browser.open(f"{cluster.url}/ui/")
        await browser.send("Browser.grantPermissions", permissions=["clipboardReadWrite"], origin=cluster.url)
        says(cluster, "some *text*")
        await ask(page, "something")
        await page.shows(".turn.assistant .actions", "Retry")
        await page.click(".turn.assistant .actions button")
        await page.shows(".turn.assistant .actions button", "Copied")
        assert await page.evaluate("navigator.clipboard.readText()") == "some *text*"
        await page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")  # as over plain HTTP
        await page.evaluate("document.addEventListener('copy', () => (window.copied = document.activeElement.value))")
        await page.click(".turn.user .actions button")
        await page.until("window.copied === 'something'")


async def test_stopping_ends_the_generation_and_retrying_begins_another(make_cluster, browser, wait_until) -> None:
    async with make_cluster(1) as cluster:
        page = await browser.open(f"{cluster.url}/ui/")
        says(cluster, "abcdefghijklmnop")
        script = cluster.workers[0].script
        script.gate, script.gate_after = asyncio.Event(), 5
        for number, stop in enumerate((lambda: page.click("#stop"), lambda: page.press("Escape", 27))):
            await ask(page, "go on and on")
            await page.shows(".turn.assistant:last-child .text", "abcde")
            await stop()
            await wait_until(lambda n=number: [call.outcome for call in cluster.calls()] == ["cancelled"] * (n + 1))
            await page.shows(".turn.assistant:last-child .stats", "stopped")
        await cluster.idle()
        script.gate.set()
        await page.evaluate("[...document.querySelectorAll('.turn:last-child button')].at(-1).click()")  # Retry
        await page.shows(".turn.assistant:last-child .text", "abcdefghijklmnop")
        assert await page.evaluate("document.querySelectorAll('.turn').length") == 4
        assert [message.role for message in cluster.tokenizer.chats[-1].messages] == ["user", "assistant", "user"]
        await page.click("#clear")
        await page.hides(".turn")
        assert await page.evaluate("document.activeElement.id") == "text"
        assert page.complaints() == []


async def test_tool_calls_are_shown_and_answered_and_schemas_are_sent(make_cluster, browser, wait_until, shoot) -> None:
    async with make_cluster(1) as cluster:
        page = await browser.open(f"{cluster.url}/ui/")
        says(cluster, 'Let me see.<call weather>{"place": "Oslo <b>"}</call>')
        await page.write("#tools", json.dumps(TOOLS))
        await ask(page, "What is the weather?")
        await page.shows(".call code", "weather")
        await page.shows(".call pre", '"place": "Oslo <b>"')
        await page.shows(".results button", "Send result")
        await shoot(page, "tools")
        says(cluster, "It rains.")
        await page.write(".results textarea", "rain")
        await page.click(".results button")
        await page.shows(".turn.assistant:last-child .text", "It rains.")
        chat = cluster.tokenizer.chats[-1]
        assert json.loads(chat.tools) == TOOLS
        assert [message.role for message in chat.messages] == ["user", "assistant", "tool"]
        assert chat.messages[1].tool_calls[0].id == chat.messages[2].tool_call_id
        await page.write("#tools", "")
        await page.write("#schema", json.dumps(SCHEMA))
        await ask(page, "As JSON.")
        await wait_until(lambda: bool(cluster.tokenizer.grammars))
        assert json.loads(cluster.tokenizer.grammars[-1].grammar.json_schema) == SCHEMA
        assert page.complaints() == []


async def test_errors_are_shown_as_the_router_tells_them_with_their_field(make_cluster, browser, shoot) -> None:
    async with make_cluster(1) as cluster:
        page = await browser.open(f"{cluster.url}/ui/")
        wrong = "document.querySelector('[aria-invalid]')?.id"
        await page.write("#temperature", "-3")
        await ask(page, "first")
        await page.shows(".turn.assistant:last-child .error", "temperature: expected")
        await page.shows(".turn.assistant:last-child .error .about", "temperature · HTTP 400")
        assert await page.evaluate(wrong) == "temperature"
        await shoot(page, "error")
        await page.write("#temperature", "")
        await page.write("#tools", "{not json")
        await ask(page, "second")
        await page.shows(".turn.assistant:last-child .error", "this is not JSON")
        assert await page.evaluate(wrong) == "tools"
        await page.write("#tools", "")
        await page.write("#schema", '{"type": "bad"}')  # of which the tokenizer says so
        await ask(page, "third")
        await page.shows(".turn.assistant:last-child .error", "it is bad")
        assert await page.evaluate(wrong) == "schema"
        await page.write("#schema", "")
        says(cluster, "well")
        await ask(page, "fourth")
        await page.shows(".turn.assistant:last-child .text", "well")
        (chat,) = (chat for chat in cluster.tokenizer.chats if chat.messages[-1].content == "fourth")
        assert [message.content for message in chat.messages] == ["fourth"]  # what got no answer is no part of it
        assert await page.evaluate(wrong) is None
        cluster.workers[0].script = Script(
            tokens=lambda _: encode("half of it")[1:], fail_after=4, error=InternalError("it broke")
        )
        await ask(page, "fifth")
        await page.shows(".turn.assistant:last-child .error", "it broke")
        assert (await page.text(".turn.assistant:last-child .text")) in (
            "hal",
            "half",
        )  # an error may overtake the last letter
        refused = [told for told in page.complaints() if "400" not in told]
        assert refused == []


async def test_the_fleet_is_live_and_rests_in_a_hidden_tab(make_cluster, browser, wait_until, shoot) -> None:
    async with make_cluster(2, breaker_open_seconds=600) as cluster:
        page = await browser.open(f"{cluster.url}/ui/#fleet")
        alive, dead = cluster.workers
        alive.load.running_requests, alive.load.waiting_requests, alive.load.queued_tokens = 3, 4, 567
        alive.load.used_pages, alive.load.prompt_tokens, alive.load.cached_tokens = 2500, 100, 40
        await page.shows("tbody tr", "25 %")
        row = next(line for line in (await page.text("tbody")).split(alive.address)[1:])
        for shown in ("fake", "up", "closed", "3", "4", "567 tokens to prefill", "25 %", "40 %"):
            assert shown in row
        await shoot(page, "fleet-light")
        await dead.kill()
        await page.shows("tr.down", dead.address)
        await page.shows("tr.down .state", "down")
        await page.shows("#health", "1 of 2 workers up")
        assert "down" in await page.evaluate("document.getElementById('fleet-news').textContent")
        await shoot(page, "fleet-down")
        for _ in range(5):
            next(worker for worker in cluster.router.registry.all() if worker.address == alive.address).breaker.fault()
        await page.shows("tr.up .broken", "open")
        size = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
        await page.send("Emulation.setDeviceMetricsOverride", **size)
        await shoot(page, "fleet-phone")
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        await page.send("Emulation.clearDeviceMetricsOverride")
        looks = "performance.getEntriesByType('resource').filter((e) => e.name.endsWith('/fleet')).length"
        seen = await page.evaluate(looks)
        await page.until(f"{looks} > {seen}")
        other = await browser.open("about:blank#other")
        await browser.send("Target.activateTarget", targetId=other.target)
        await page.until("document.hidden")
        await page.until("!performance.getEntriesByType('resource').some((e) => !e.responseEnd)")
        rested = await page.evaluate(looks)
        await page.evaluate("new Promise((done) => setTimeout(done, 2500))")  # two looks would have come
        assert await page.evaluate(looks) <= rested + 1
        await browser.send("Target.activateTarget", targetId=page.target)
        await page.until(f"!document.hidden && {looks} > {rested}")
        assert page.complaints() == []
        await page.send("Network.enable")
        for offline in (True, False):  # as if the router were gone, and came back
            line = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
            await page.send("Network.emulateNetworkConditions", offline=offline, **line)
            await page.shows("#health", "the router does not answer" if offline else "1 of 2 workers up")
            assert await page.evaluate("document.getElementById('fleet').classList.contains('old')") == offline


async def test_a_route_is_explained_worker_by_worker(make_cluster, browser, shoot) -> None:
    async with make_cluster(2, shadow_policies=("round_robin",)) as cluster:
        page = await browser.open(f"{cluster.url}/ui/")
        says(cluster, "hello")
        await ask(page, "a long enough prompt that some worker has some of it cached")
        await page.shows(".turn.assistant:last-child .actions", "Retry")
        await page.click('nav a[href="#route"]')
        registry = cluster.router.registry
        out = next(worker for worker in registry.all() if worker.address != cluster.router.status().workers[0].address)
        registry.set_draining(out, True)
        await page.write("#route-text", "and this?")
        await page.click("#route-after")
        await page.click("#route-form button")
        await page.shows("tr.chosen", "chosen: ")
        await page.shows("tr.excluded", out.address)
        await page.shows("#route ul", "round_robin would choose")
        assert out.address not in await page.text("tr.chosen")
        await shoot(page, "route")
        assert len(cluster.calls()) == 1
        assert [message.role for message in cluster.tokenizer.chats[-1].messages] == ["user", "assistant", "user"]
        await cluster.workers[0].kill()
        await cluster.workers[1].kill()
        await page.click("#route-form button")
        await page.shows("#route-error", "HTTP 503")


async def test_a_key_is_asked_for_and_nothing_is_shown_without_one(make_cluster, browser, tmp_path, shoot) -> None:
    key = make_key()
    (tmp_path / "keys").write_text(f"alice {hash_key(key)}\n")
    async with make_cluster(1, api_keys=tmp_path / "keys", status_page="on") as cluster:
        page = await browser.open(f"{cluster.url}/ui/#fleet")
        await page.shows("#key-form", "An API key, please")
        assert await page.evaluate("document.activeElement.id") == "key"
        text = await page.evaluate("document.body.innerText")
        assert cluster.workers[0].address not in text
        assert "fake" not in text
        await shoot(page, "key")
        await page.write("#key", "wrong")
        await page.enter()
        await page.shows("#key-error", "the API key is not known")
        await page.write("#key", key)
        await page.enter()
        await page.shows("tbody", cluster.workers[0].address)
        await page.hides("#key-form")
        kept = await page.evaluate("[{...sessionStorage}, {...localStorage}, document.cookie]")
        assert kept[0]["sapwood-key"] == key
        assert kept[1:] == [{}, ""]
        await page.click('nav a[href="#chat"]')
        says(cluster, "hello alice")
        await ask(page, "hello")
        await page.shows(".turn.assistant .text", "hello alice")
        await page.send("Page.reload")
        await page.shows(".turn.assistant .text", "hello alice")  # this tab has the key,
        other = await browser.open(f"{cluster.url}/ui/")
        await other.shows("#key-form", "An API key, please")  # another has not
        await browser.send("Target.activateTarget", targetId=page.target)
        await page.click("#forget-key")
        await page.shows("#key-form", "An API key, please")
        assert key not in json.dumps(await page.evaluate("({...sessionStorage})"))
        assert not await page.evaluate("document.querySelector('.turn')")


async def test_where_workers_are_for_operators_the_page_says_so(make_cluster, browser) -> None:
    async with make_cluster(1, admin_port=0) as cluster:
        page = await browser.open(f"{cluster.url}/ui/#fleet")
        await page.shows("#fleet", "shows its workers to operators only")
        await page.shows("#fleet", "fake 1 worker")
        assert cluster.workers[0].address not in await page.evaluate("document.body.innerText")
        await page.click('nav a[href="#route"]')
        await page.shows("#route-closed", "to operators only")
        await page.hides("#route-form")


async def test_all_of_it_can_be_reached_with_the_keyboard_and_has_a_name(make_cluster, browser) -> None:
    async with make_cluster(1) as cluster:
        page = await browser.open(f"{cluster.url}/ui/")
        await page.shows("#model", "fake")
        seen = []
        await page.evaluate("document.activeElement.blur()")
        for _ in range(25):
            await page.press("Tab", 9)
            seen.append(await page.evaluate("document.activeElement.id || document.activeElement.hash"))
        for reached in (
            "#chat",
            "#fleet",
            "#route",
            "log",
            "text",
            "clear",
            "send",
            "model",
            "system",
            "tools",
            "schema",
        ):
            assert reached in seen
        for view in ("chat", "fleet", "route"):
            await page.evaluate(f"location.hash = '{view}'")
            await page.until(f"document.getElementById('{view}-view').checkVisibility()")
            tree = await page.send("Accessibility.getFullAXTree")
            roles = ("button", "textbox", "combobox", "checkbox", "link")
            nodes = [node for node in tree["nodes"] if not node["ignored"] and node["role"]["value"] in roles]
            assert nodes
            assert [node["role"]["value"] for node in nodes if not node["name"]["value"].strip()] == []
