"""How long conversations of two tenants wait to be rendered while a third one's never end.

    python benchmarks/bench_renderings.py [--seconds 25] [--leaves]

Sixteen renderings of the third tenant's are under way at any time, of all the ways in which a template can fail to end; with
``--leaves`` their clients give each up after 0.3 s. Prints milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import time

from tokenizers import Tokenizer
from tokenizers.models import BPE

from sapwood.v1 import tokenizer_pb2
from sapwood_common.errors import SapwoodError
from sapwood_testing.hostile_templates import HOSTILE, switched
from sapwood_tokenizer.serve.renderer import Renderer, start_renderer
from sapwood_tokenizer.vocab.loader import LoadedTokenizer

_HOSTILE_AT_ONCE = 16
_TIMEOUT = 10.0


def _chat(salt: str, variables: str = "") -> tokenizer_pb2.ApplyChatTemplateRequest:
    messages = [{"role": "user", "content": "hello"}]
    return tokenizer_pb2.ApplyChatTemplateRequest(messages=messages, cache_salt=salt, template_variables=variables)


async def _flood(renderer: Renderer, number: int, *, leaves: bool) -> None:
    for name in itertools.islice(itertools.cycle(HOSTILE), number, None, _HOSTILE_AT_ONCE):
        asked = renderer.render(_chat("mallory", f'{{"what": "{name}"}}'), prompted=True)
        with contextlib.suppress(SapwoodError, TimeoutError):
            await (asyncio.wait_for(asked, 0.3) if leaves else asked)


async def _ask(renderer: Renderer, tenant: str, until: float, waits: list[float]) -> None:
    while (began := time.perf_counter()) < until:
        await renderer.render(_chat(tenant), prompted=True)
        waits.append((time.perf_counter() - began) * 1e3)
        await asyncio.sleep(0.05)


async def _run(seconds: float, *, leaves: bool) -> None:
    loaded = LoadedTokenizer(Tokenizer(BPE()), "origin", 1, None, (), frozenset(), switched(), "hostile", {})
    renderer = await start_renderer(loaded, _TIMEOUT)
    assert renderer is not None
    for floods in (0, _HOSTILE_AT_ONCE):
        waits: list[float] = []
        flood = [asyncio.create_task(_flood(renderer, number, leaves=leaves)) for number in range(floods)]
        await asyncio.sleep(0.5)
        until = time.perf_counter() + seconds
        await asyncio.gather(*(_ask(renderer, tenant, until, waits) for tenant in ("alice", "bob")))
        for task in flood:
            task.cancel()
        waits.sort()
        p50, p99 = (waits[int(len(waits) * share)] for share in (0.5, 0.99))
        print(f"{floods:2} hostile: {len(waits)} renderings, p50 {p50:.1f}, p99 {p99:.1f}, longest {waits[-1]:.1f} ms")
    await renderer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--leaves", action="store_true")
    given = parser.parse_args()
    asyncio.run(_run(given.seconds, leaves=given.leaves))
