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
        await page.dark()
        await shoot(page, "chat-dark")
        await page.phone()
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        await page.reload()
        await page.shows(".turn.assistant .text", "deeper")  # the tab keeps the conversation,
        await shoot(page, "chat-phone")
        assert await page.evaluate("document.querySelector('#temperature').value") == "0.5"
        await ask(page, "And now?")
        await wait_until(lambda: len(cluster.tokenizer.chats) == 2)
        roles = [message.role for message in cluster.tokenizer.chats[1].messages]
        assert roles == ["system", "user", "assistant", "user"]  # which continues
        assert page.complaints() == []


RICH = r"""| city | people |
|---|---:|
| Oslo | 717 710 |
| **Bergen** | 291 940 |

$$\frac{-b \pm \sqrt{b^2 - 4ac}}{2a}$$

The sum \(\sum_{i=1}^n x_i\) costs $5 and $6, not $x^2$;
\[ \begin{pmatrix} a & b \\ c & d \end{pmatrix} \] is a matrix, and $\unknown{x}$ is not known.

```python
def f(x):  # a comment
    return "text" + str(42)
```
"""


async def test_tables_formulas_and_code_are_drawn(make_cluster, browser, shoot) -> None:
    async with make_cluster(1) as cluster:
        page = await browser.open(f"{cluster.url}/ui/")
        says(cluster, RICH)
        await ask(page, "show me")
        await page.shows(".turn.assistant .actions", "Retry")
        text = ".turn.assistant .text"
        assert await page.text(f"{text} td.end") == "717 710"
        assert await page.text(f"{text} td strong") == "Bergen"
        for drawn in ("mfrac", "msqrt", "munderover, .text msubsup", "mtable", "msup", ".code-comment", ".code-string"):
            assert await page.evaluate(f"Boolean(document.querySelector('{text} {drawn}'))"), drawn
        assert await page.evaluate(f"document.querySelectorAll('{text} math').length") == 4
        shown = await page.text(text)
        assert "costs $5 and $6, not" in shown
        assert r"$\unknown{x}$" in shown
        assert await page.text(f"{text} .code-word") == "def"
        assert await page.text(f"{text} pre") == 'def f(x):  # a comment\n    return "text" + str(42)'
        await page.evaluate("document.querySelector('.turn.assistant').scrollIntoView()")
        await shoot(page, "rich")
        assert page.complaints() == []


async def test_an_edited_question_and_another_answer_are_branches_that_survive_a_reload(
    make_cluster, browser, shoot
) -> None:
    async with make_cluster(1) as cluster:
        page = await browser.open(f"{cluster.url}/ui/")
        for number, answer in enumerate(("one answer", "another answer")):
            says(cluster, answer)
            if number:
                await page.press_button(".turn.assistant", "Retry")
            else:
                await ask(page, "a question")
            await page.shows(".turn.assistant .text", answer)
            await page.shows(".turn.assistant .actions", "Retry")
        assert await page.evaluate("document.querySelectorAll('.turn').length") == 2
        await page.shows(".turn.assistant .switch", "2 of 2")
        await page.press_button(".turn.assistant", "Side by side")
        await page.until("document.querySelectorAll('.branches .turn').length === 2")
        await page.shows(".branches .turn:first-child .text", "one answer")
        await page.press_button(".branches .turn:first-child", "Continue with this")
        await page.shows(".turn.assistant .switch", "1 of 2")
        says(cluster, "a third")
        await page.press_button(".turn.user", "Edit")
        await page.write(".edit textarea", "a better question")
        await page.click(".edit [type=submit]")
        await page.shows(".turn.assistant .text", "a third")
        await page.shows(".turn.assistant .actions", "Retry")
        assert [message.content for message in cluster.tokenizer.chats[-1].messages] == ["a better question"]
        await page.shows(".turn.user .switch", "2 of 2")
        await page.reload()
        await page.shows(".turn.assistant .text", "a third")
        await page.click(".turn.user .switch button")
        await page.shows(".turn.user .text", "a question")
        await page.shows(".turn.assistant .switch", "2 of 2")  # of a branch, its latest end
        await page.click("#clear")
        await page.hides(".turn")
        await page.click("#conversations .title")
        await page.shows(".turn.user .text", "a question")
        (kept,) = json.loads(await exported(page))["conversations"]
        assert len(kept["turns"]) == 5
        await page.click("#conversations li button:last-child")
        await page.hides(".turn")
        await page.hides("#conversations li")
        assert page.complaints() == []


async def give(page, files: dict[str, str]) -> None:
    """Chooses files to import, as the browser's own window does; each by its name, with an expression of its text."""
    parts = ", ".join(f"new File([{text}], {json.dumps(name)})" for name, text in files.items())
    await page.evaluate(
        f"(() => {{ const chosen = new DataTransfer(); [{parts}].forEach((file) => chosen.items.add(file));"
        "const field = document.getElementById('import-file'); field.files = chosen.files;"
        "field.dispatchEvent(new Event('change')) })()"
    )


async def exported(page) -> str:
    """What "Export all" lets the browser save."""
    await page.evaluate(
        "(() => { const real = URL.createObjectURL; delete window.saved;"
        "URL.createObjectURL = (blob) => { blob.text().then((text) => (window.saved = text)); return real.call(URL, blob) };"
        "HTMLAnchorElement.prototype.click = () => {} })()"
    )
    await page.click("#export")
    await page.until("window.saved")
    return await page.evaluate("window.saved")


async def test_exported_conversations_are_imported_as_they_were(make_cluster, browser) -> None:
    async with make_cluster(1) as cluster:
        page = await browser.open(f"{cluster.url}/ui/")
        await page.click("#logprobs")
        says(cluster, HOSTILE)
        await ask(page, HOSTILE)
        await page.shows(".turn.assistant .actions", "Retry")
        says(cluster, "another")
        await page.press_button(".turn.assistant", "Retry")
        await page.shows(".turn.assistant .switch", "2 of 2")
        await page.shows(".turn.assistant .actions", "Retry")
        says(cluster, '<call weather>{"place": "Oslo"}</call>')
        await page.click("#clear")
        await page.write("#tools", json.dumps(TOOLS))
        await ask(page, "a second talk")
        await page.shows(".results button", "Send result")
        before = await exported(page)
        await give(page, {"all.json": json.dumps(before)})
        await page.shows("#imported", "0 imported, 2 were here already")
        for left in (1, 0):
            await page.click("#conversations li button:last-child")
            await page.until(f"document.querySelectorAll('#conversations li').length === {left}")
        await give(page, {"all.json": json.dumps(before)})
        await page.shows("#imported", "2 imported")
        kept, again = json.loads(before)["conversations"], json.loads(await exported(page))["conversations"]
        assert len(kept) == 2
        assert kept[1]["turns"][1]["tokens"]
        for one, other in zip(kept, again, strict=True):
            assert {**one, "id": 0, "changed": 0} == {**other, "id": 0, "changed": 0}
            assert one["id"] != other["id"]
        await page.click("#conversations li:last-child .title")
        await page.shows(".turn.assistant .text", "another")
        await page.click(".turn.assistant .switch button")
        assert HOSTILE in await page.text(".turn.assistant .text")
        await give(page, {"one.json": json.dumps(json.dumps({**kept[1], "turns": kept[1]["turns"][:2], "last": 2}))})
        await page.shows("#imported", "1 imported")  # one that was exported by itself
        assert not await page.evaluate("'hurt' in window")
        assert page.complaints() == []


def turn(**settings) -> dict:
    return {"number": 1, "parent": 0, "role": "user", "content": "", **settings}


async def test_a_file_that_this_page_did_not_export_is_refused_by_its_name_and_nothing_of_it_is_kept(
    make_cluster, browser, shoot
) -> None:
    pictures = ("https://elsewhere.example/x.png", "javascript:hurt = 1", "data:text/html;base64,PGI+")
    wrong = {
        "turns[0].role: expected user, assistant, tool": {"turns": [turn(role="system")]},
        "turns[0].content: expected a text": {"turns": [turn(content={})]},
        "turns[0].parent: expected 0 or an earlier": {"turns": [turn(parent=1)]},
        "turns[0].number: expected one that no": {"turns": [turn(number=0)]},
        "turns[1].number: expected one that no": {"turns": [turn(), turn()]},
        "turns[0].tokens[0]: expected a list of 3": {"turns": [turn(tokens=[["a"]])]},
        "turns[0].tool_calls[0].function: expected an object": {"turns": [turn(tool_calls=[{"id": "1"}])]},
        "turns[0].usage.prompt_tokens: expected a whole": {"turns": [turn(usage={"prompt_tokens": "<b>"})]},
        "turns[0]: expected an object": {"turns": ["hello"]},
        "turns: expected a list": {"turns": {}},
        "last: expected a turn's number": {"turns": [turn()], "last": 7},
    }
    async with make_cluster(1) as cluster:
        page = await browser.open(f"{cluster.url}/ui/")
        await page.evaluate("document.getElementById('past').open = true")
        fine = {"turns": [turn(content="fine")], "last": 1}

        async def refused(said: str, files: dict[str, str]) -> None:
            await give(page, files)
            await page.shows("#import-error", said)

        for said, conversation in wrong.items():
            text = json.dumps({"conversations": [fine, {"last": 0, **conversation}]})
            await refused(f"talk.json: conversations[1].{said}", {"talk.json": json.dumps(text)})
        for url in pictures:
            text = json.dumps({"last": 1, "turns": [turn(pictures=[{"name": "x", "url": url}])]})
            said = "p.json: the conversation.turns[0].pictures[0].url: expected a picture as data:image"
            await refused(said, {"p.json": json.dumps(text)})
        await shoot(page, "import-refused")
        await refused("a.html is not JSON", {"a.html": json.dumps(HOSTILE)})
        await refused("other.json is no export of this page", {"other.json": "'[{\"mapping\": {}}]'"})
        await refused("null.json is no export", {"null.json": "'null'"})
        await refused("large.json has 65.0 MB, the most is 64.0 MB", {"large.json": "new Uint8Array(65 * 1024 * 1024)"})
        many = json.dumps({"conversations": [{**fine, "turns": [turn(content=str(each))]} for each in range(501)]})
        await refused("a browser keeps 500 conversations; here are 0", {"many.json": json.dumps(many)})
        await refused("bad.json is not JSON", {"fine.json": json.dumps(json.dumps(fine)), "bad.json": "'{'"})
        await page.hides("#conversations li")
        assert not await page.evaluate("'hurt' in window")
        hostile = {"id": "<b>", "title": HOSTILE, "last": 2, "turns": [turn(content=HOSTILE)]}
        hostile["turns"].append(
            turn(number=2, parent=1, role="assistant", content=HOSTILE, model=HOSTILE, extra=HOSTILE)
        )
        await give(page, {"hostile.json": json.dumps(json.dumps(hostile))})
        await page.shows("#imported", "1 imported")
        await page.hides("#import-error")
        await page.click("#conversations .title")
        assert HOSTILE in await page.text(".turn.assistant .text")
        assert await page.evaluate("document.querySelectorAll('#log :is(script, img, a, iframe)').length") == 0
        assert not await page.evaluate("'hurt' in window")
        assert HOSTILE not in await page.evaluate("document.querySelector('#conversations li').dataset.id")
        assert page.complaints() == []


async def test_two_models_answer_side_by_side(make_cluster, browser, shoot) -> None:
    async with make_cluster(1) as cluster:
        page = await browser.open(f"{cluster.url}/ui/")
        says(cluster, "well")
        await page.shows("#model", "fake")
        await page.evaluate(
            "(e => { e.value = 'fake'; e.dispatchEvent(new Event('input', {bubbles: true})) })"
            "(document.getElementById('other-model'))"
        )
        await ask(page, "both of you")
        await page.until("document.querySelectorAll('.branches .turn .actions:not([hidden])').length === 2")
        assert len(cluster.calls()) == 2
        await shoot(page, "side-by-side")
        await page.press_button(".branches .turn:last-child", "Continue with this")
        await page.shows(".turn.assistant .switch", "2 of 2")
        await page.hides(".branches")
        assert page.complaints() == []


async def test_pictures_and_texts_are_dropped_and_sent(make_cluster, browser, wait_until, shoot) -> None:
    drop = """(async () => {
      const canvas = Object.assign(document.createElement("canvas"), {width: 40, height: 30});
      canvas.getContext("2d").fillRect(0, 0, 20, 30);
      const picture = await new Promise((done) => canvas.toBlob(done));
      const carried = new DataTransfer();
      carried.items.add(new File([picture], "half.png", {type: "image/png"}));
      carried.items.add(new File(["a `` b"], "notes.txt", {type: "text/plain"}));
      carried.items.add(new File([new Uint8Array([255, 0, 1])], "some.bin"));
      const dropped = new DragEvent("drop", {dataTransfer: carried, bubbles: true, cancelable: true});
      document.getElementById("text").dispatchEvent(dropped);
    })()"""
    async with make_cluster(1) as cluster:
        page = await browser.open(f"{cluster.url}/ui/")
        await page.evaluate(drop)
        await page.shows("#attached .file", "notes.txt")
        await page.shows("#attach-error", "some.bin is neither a text in UTF-8 nor a picture")
        await page.until("document.querySelector('#attached img')?.naturalWidth === 40")  # the policy lets it be shown
        await shoot(page, "attached")
        await page.evaluate(
            "(() => { window.sent = []; const real = fetch;"
            "window.fetch = (...a) => (a[1]?.body && window.sent.push(JSON.parse(a[1].body)), real(...a)) })()"
        )
        says(cluster, "seen")
        await ask(page, "What is it?")
        await page.until("window.sent.length")
        (message,) = (await page.evaluate("window.sent"))[0]["messages"]
        picture, text = message["content"]
        assert picture["image_url"]["url"].startswith("data:image/png;base64,")
        assert text["text"] == "File notes.txt:\n```\na `` b\n```\n\nWhat is it?"
        await page.hides("#attached")
        await page.shows(".turn.user .file", "notes.txt")
        await page.until("document.querySelector('.turn.user img').naturalWidth === 40")


async def test_an_answers_tokens_are_shown_with_what_was_likely_instead(make_cluster, browser, shoot) -> None:
    async with make_cluster(1) as cluster:
        page = await browser.open(f"{cluster.url}/ui/")
        says(cluster, "abc")
        await page.click("#logprobs")
        await ask(page, "spell")
        await page.shows(".turn.assistant .actions", "Tokens")
        assert cluster.calls()[0].request.sampling.logprobs == 5
        await page.press_button(".turn.assistant", "Tokens")
        await page.until("document.querySelectorAll('.tokens .token').length >= 3")
        await page.evaluate("document.querySelector('.tokens').focus()")
        await page.press("ArrowRight")
        await page.shows("#token-tip .chosen", "a")
        assert await page.evaluate("document.querySelectorAll('#token-tip tr').length") == 5
        await shoot(page, "tokens")
        await page.press_button(".turn.assistant", "Tokens")
        await page.shows(".turn.assistant .text", "abc")
        await page.hides("#token-tip")
        assert page.complaints() == []


async def test_sampling_settings_are_sent_and_errors_open_them(make_cluster, browser) -> None:
    async with make_cluster(1) as cluster:
        page = await browser.open(f"{cluster.url}/ui/")
        says(cluster, "well")
        given = {"top_p": "0.9", "top_k": "40", "min_p": "0.05", "repetition_penalty": "1.1", "stop-texts": "END\nSTOP"}
        await page.click("#sampling summary")
        for name, value in given.items():
            await page.write(f"#{name}", value)
        await ask(page, "so")
        await page.shows(".turn.assistant .actions", "Retry")
        sampling = cluster.calls()[0].request.sampling
        assert (sampling.top_p, sampling.top_k) == (pytest.approx(0.9), 40)
        assert (sampling.min_p, sampling.repetition_penalty) == (pytest.approx(0.05), pytest.approx(1.1))
        await page.click("#sampling summary")
        await page.evaluate("document.getElementById('top_p').value = '7'")
        await page.press_button(".turn.assistant", "Retry")
        await page.shows(".turn.assistant .error", "top_p")
        await page.until("document.getElementById('sampling').open")


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


async def test_no_answer_breaks_the_page_or_keeps_the_browser(make_cluster, browser) -> None:
    names = ("constructor", "__proto__", "toString", "valueOf", "hasOwnProperty")
    texts = [f"```{name}\nx = 1\n```" for name in names]
    texts += [f"$\\{name}$ and $\\begin{{{name}}} a \\end{{{name}}}$ and $\\mathbb{{{name}}}$" for name in names]
    texts += [
        r"$" + r"\bm" * 1300 + "x$",
        r"$" + r"\sqrt" * 700 + "x$",
        "$" + "{" * 3000 + "$",
        "$" + r"\hat" * 900 + "$",
    ]
    columns = 3000
    texts += ["|a" * columns + "\n" + "|-" * columns + "\n" + "|\n" * 3000, "|a|b|\n|-|-|\n" + "|c|d|\n" * 20]
    async with make_cluster(1) as cluster:
        page = await browser.open(f"{cluster.url}/ui/")
        cluster.workers[0].script.chunk = 200  # some hundred drawings, not ten thousand
        says(cluster, "\n\n".join([*texts, "THE END"]))
        await ask(page, "break")
        await page.shows(".turn.assistant .actions", "Retry")
        shown = await page.text(".turn.assistant .text")
        assert "THE END" in shown
        assert "native code" not in shown
        for name in names:
            assert f"\\begin{{{name}}}" in shown, "what is not known is shown as it was written"
        assert await page.evaluate("document.querySelectorAll('.turn.assistant td').length") == 40
        depth = "(e => { let n = 0; for (; e; e = e.parentElement) n++; return n; })"
        assert await page.evaluate(f"Math.max(...[...document.querySelectorAll('.text *')].map({depth}))") < 200
        assert page.complaints() == []


async def test_an_answer_can_be_copied_also_where_the_browser_has_no_clipboard_for_pages(make_cluster, browser) -> None:
    async with make_cluster(1) as cluster:
        page = await browser.open(f"{cluster.url}/ui/")
        await browser.allow_clipboard(cluster.url)
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


async def test_what_follows_a_failed_answer_stays_when_that_is_asked_for_again(make_cluster, browser) -> None:
    async with make_cluster(1) as cluster:
        page = await browser.open(f"{cluster.url}/ui/")
        await page.write("#temperature", "-3")
        await ask(page, "first")
        await page.shows(".turn.assistant .error", "temperature: expected")
        await page.write("#temperature", "")
        says(cluster, "well")
        await ask(page, "second")
        await page.shows(".turn.assistant:last-child .text", "well")
        await page.shows(".turn.assistant:last-child .actions", "Retry")
        says(cluster, "later")
        await page.press_button(".turn.assistant", "Retry")
        await page.shows(".turn.assistant .text", "later")
        await page.shows(".turn.assistant .switch", "2 of 2")
        await page.click(".turn.assistant .switch button")
        await page.shows(".turn.assistant:last-child .text", "well")


async def test_stopping_ends_the_generation_and_retrying_begins_another(make_cluster, browser, wait_until) -> None:
    async with make_cluster(1) as cluster:
        page = await browser.open(f"{cluster.url}/ui/")
        says(cluster, "abcdefghijklmnop")
        script = cluster.workers[0].script
        script.gate, script.gate_after = asyncio.Event(), 5
        for number, stop in enumerate((lambda: page.click("#stop"), lambda: page.press("Escape"))):
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
        await page.phone()
        await shoot(page, "fleet-phone")
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        await page.desktop()
        looks = "performance.getEntriesByType('resource').filter((e) => e.name.endsWith('/fleet')).length"
        seen = await page.evaluate(looks)
        await page.until(f"{looks} > {seen}")
        other = await browser.open("about:blank#other")
        await other.to_front()
        await page.until("document.hidden")
        await page.until("!performance.getEntriesByType('resource').some((e) => !e.responseEnd)")
        rested = await page.evaluate(looks)
        await page.evaluate("new Promise((done) => setTimeout(done, 2500))")  # two looks would have come
        assert await page.evaluate(looks) <= rested + 1
        await page.to_front()
        await page.until(f"!document.hidden && {looks} > {rested}")
        assert page.complaints() == []
        for offline in (True, False):  # as if the router were gone, and came back
            await page.offline(offline)
            await page.shows("#health", "the router does not answer" if offline else "1 of 2 workers up")
            assert await page.evaluate("document.getElementById('fleet').classList.contains('old')") == offline


async def test_the_last_hour_is_drawn_with_what_happened(make_cluster, browser, wait_until, shoot) -> None:
    async with make_cluster(2) as cluster:
        page = await browser.open(f"{cluster.url}/ui/#fleet")
        history = cluster.router._history
        for prompt in ("a first one", "a second one", "a third"):
            await cluster.generate(prompt * 3)
            history.sample()
        out = cluster.router.registry.all()[1]
        cluster.router.registry.set_draining(out, True)
        history.sample()
        await page.shows(".charts figcaption", "First token, ms")
        await page.shows(".events .draining", f"{out.address} drains")
        await page.shows(".events .up", "is up")
        charts = "[...document.querySelectorAll('.charts figure')].map((e) => e.innerText)"
        titles = " ".join(await page.evaluate(charts))
        for shown in (
            "A token, ms",
            "Waiting",
            "Tokens a second",
            "Prompt tokens cached",
            "Device's cache in use",
            "tier",
        ):
            assert shown in titles
        assert await page.evaluate("document.querySelectorAll('.charts .tick.draining title').length") > 0
        drawn = "document.querySelector('.charts .line.together').getAttribute('d').includes('L')"
        await page.until(drawn)
        await page.evaluate("document.querySelector('.charts').scrollIntoView()")
        await shoot(page, "history")
        assert page.complaints() == []


async def test_the_cache_is_drawn_as_a_tree_of_prefixes(make_cluster, browser, shoot) -> None:
    async with make_cluster(2) as cluster:
        page = await browser.open(f"{cluster.url}/ui/#cache")
        await page.shows("#cache", "No prompt has a whole page yet")
        for end in ("one way to go on", "another way", "another world", "yet a third way that is longer"):
            await cluster.generate("You are a helpful assistant. " + end)
        await page.until("document.querySelectorAll('.node').length >= 4")
        first = await page.evaluate("document.querySelector('.node').title")
        assert "after 0 tokens; in 4 of the latest prompts; held by" in first
        rows = "[...document.querySelectorAll('.node')].map((e) => e.style.gridRow)"
        assert len(set(await page.evaluate(rows))) >= 4
        await shoot(page, "cache")
        await page.phone()
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        await shoot(page, "cache-phone")
        assert page.complaints() == []


async def test_a_requests_time_is_drawn_over_the_services(make_cluster, browser, shoot) -> None:
    async with make_cluster(1) as cluster:
        page = await browser.open(f"{cluster.url}/ui/#trace")
        await page.shows("#trace", "No request has ended yet")
        cluster.workers[0].script.delay = 0.02
        await cluster.generate("something to say", metadata=(("x-request-id", "seen-in-the-page"),))
        await page.shows("#trace h2", "seen-in-the-page")
        for service, stage in (("tokenizer", "prepare"), ("worker", "first token"), ("router", "select")):
            await page.shows(f".bars tr:has(.{service})", stage)
        await page.shows(".bars", cluster.workers[0].address)
        await page.shows(".timeline .hint", "no worker is known to hold a whole page of the prompt")
        widths = await page.evaluate("[...document.querySelectorAll('.bar-of')].map((e) => parseFloat(e.style.width))")
        assert all(0 < width <= 100 for width in widths)
        await shoot(page, "trace")
        await page.phone()
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        cut = (
            "[...document.querySelectorAll('.bars .number')].some((e) => e.getBoundingClientRect().right > innerWidth)"
        )
        assert not await page.evaluate(cut), "each stage's time is seen without scrolling"
        await shoot(page, "trace-phone")
        assert page.complaints() == []


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
        await page.shows("tr.chosen", "chosen: it holds the most of the prompt")
        await page.shows("tr.excluded", out.address)
        await page.shows("#route ul", "round_robin would choose")
        sums = "[...document.querySelectorAll('.sums tbody tr')].map("
        sums += "(row) => [...row.querySelectorAll('strong')].map((e) => e.innerText))"
        for parts in await page.evaluate(sums):
            *each, whole = (float(text.replace(",", "")) for text in parts)
            assert sum(each) == pytest.approx(whole, abs=1)
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
        await page.reload()
        await page.shows(".turn.assistant .text", "hello alice")  # this tab has the key,
        other = await browser.open(f"{cluster.url}/ui/")
        await other.shows("#key-form", "An API key, please")  # another has not
        await page.to_front()
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
            await page.press("Tab")
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
        for view in ("chat", "fleet", "route", "cache", "trace"):
            await page.evaluate(f"location.hash = '{view}'")
            await page.until(f"document.getElementById('{view}-view').checkVisibility()")
            controls, nameless = await page.nameless_controls()
            assert controls
            assert nameless == []
