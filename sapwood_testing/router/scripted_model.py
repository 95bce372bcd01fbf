"""A model whose answers a test writes, behind a real tokenizer and a real router: any client can be tried without weights."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sapwood_testing.router.fake_worker import FakeWorker

SPECIAL = ("<bos>", "<|im_end|>", "<|im_start|>")
TEMPLATE = """\
{% if tools %}
<|im_start|>system
<tools>
{% for tool in tools %}
{{ tool | tojson }}
{% endfor %}
</tools><|im_end|>
{% endif %}
{% for message in messages %}
<|im_start|>{{ message.role }}
{{ message.content }}
{% for call in message.tool_calls or [] %}
<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>
{% endfor %}
<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""
"""ChatML, with tools and calls as Hermes writes them."""

Tool = dict[str, Any]


class ScriptedModel(FakeWorker):
    """A worker that answers with text.

    Args:
        answer: The answer to a prompt, as the model would write it.
        context_length: Most tokens of prompt and answer, which are about as many as characters.

    Attributes:
        prompts: Those seen, in order.
        answers: What each was answered.
        http: The URL of the router's HTTP front, while it runs.
        log: What the router has logged.
    """

    def __init__(self, answer: Callable[[str], str], context_length: int = 1_000_000) -> None:
        super().__init__("demo", page_size=16, context_length=context_length)
        self.answer = answer
        self.prompts: list[str] = []
        self.answers: list[str] = []
        self.http = ""
        self.log: list[str] = []
        self._vocabulary = _make_tokenizer()
        self.script.tokens = self._tokens
        self.script.chunk = 64

    def _tokens(self, prompt: Sequence[int]) -> list[int]:
        text: str = self._vocabulary.decode(prompt, skip_special_tokens=False)
        answer = self.answer(text)
        self.prompts.append(text)
        self.answers.append(answer)
        ids: list[int] = self._vocabulary.encode(answer, add_special_tokens=False).ids
        return ids

    @contextlib.contextmanager
    def serving(self, folder: Path, tool_parser: str = "hermes", *flags: str) -> Iterator[None]:
        """Starts worker, tokenizer and router, and ends them.

        Args:
            folder: Where the tokenizer's files go.
            tool_parser: The family of the calls in answers.
            flags: Further flags of the router.
        """
        self._vocabulary.save(str(folder / "tokenizer.json"))
        (folder / "config.json").write_text("{}")
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL[1], "chat_template": TEMPLATE}))
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self.start(), loop).result()
            tokenizer = ["--model", str(folder), "--tool-parser", tool_parser, "--served-model-name", "demo"]
            with (
                _started("sapwood_tokenizer", r"\blistening on (\S+:\d+)", tokenizer) as (served, _),
                _started(
                    "sapwood_router",
                    r"HTTP listening on (\S+:\d+)",
                    ["--http-port", "0", "--workers", self.address, "--tokenizer", served, *flags],
                ) as (http, self.log),
            ):
                self.http = f"http://{http}"
                yield
        finally:
            asyncio.run_coroutine_threadsafe(self.kill(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()


def tools_of(prompt: str) -> dict[str, Tool]:
    """The functions that a prompt offers, by name."""
    found = re.search(r"<tools>\n(.*?)\n</tools>", prompt, re.DOTALL)
    offered = [json.loads(line)["function"] for line in found[1].split("\n")] if found else []
    return {each["name"]: each for each in offered}


def call(name: str, arguments: dict[str, Any]) -> str:
    """A call of a tool as Hermes writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _make_tokenizer() -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return made


@contextlib.contextmanager
def _started(module: str, ready: str, flags: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """A service's process; gives where it listens, and its log, which grows."""
    command = [sys.executable, "-m", module, "--port", "0", "--metrics-port", "0", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    lines: list[str] = []
    assert process.stderr is not None
    stderr = process.stderr
    try:
        for line in stderr:
            lines.append(line)
            if found := re.search(ready, line):
                break
        else:
            raise AssertionError(f"{module} has ended:\n{''.join(lines)}")
        reader = threading.Thread(target=lambda: lines.extend(stderr), daemon=True)
        reader.start()
        yield found[1], lines
    finally:
        process.kill()
        process.wait()
