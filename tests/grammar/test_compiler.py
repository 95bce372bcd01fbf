"""Compilation that cannot harm: deadlines, cancellation, crashes, sizes and the cache."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sapwood_common.errors import DeadlineExceededError, InvalidArgumentError, ResourceExhaustedError
from sapwood_common.grammar.artefact import GrammarArtefact
from sapwood_common.grammar.compile_pool import CompilePool
from sapwood_common.grammar.compiler import CompilerLimits, GrammarCompiler
from sapwood_common.grammar.source import GrammarSource

FINGERPRINT = b"fingerprint of 1"
# Takes the compiler seconds, and fails in the end.
HOSTILE = GrammarSource("regex", "|".join(str(number * 7919) for number in range(100_000)))
EASY = GrammarSource("regex", "[a-z]+")


@pytest.fixture
async def compiler() -> AsyncIterator[GrammarCompiler]:
    made = GrammarCompiler(FINGERPRINT, (), CompilerLimits(timeout=60))
    yield made
    await made.close()


def children() -> set[int]:
    """Process ids of the compile processes that are alive below this process."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(stat[1]) == os.getpid() and stat[0] != "Z" and "compile_process" in (entry / "cmdline").read_text():
                found.add(int(entry.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


async def test_an_artefact_holds_key_and_vocabulary(compiler):
    artefact = GrammarArtefact.from_bytes(await compiler.compile(EASY))
    assert artefact.key == EASY.key(FINGERPRINT)
    assert artefact.fingerprint == FINGERPRINT


async def stuck(compiler: GrammarCompiler, source: GrammarSource = HOSTILE) -> asyncio.Task[bytes]:
    """A compilation that has a process, which is stopped: it comes to no end by itself."""
    await compiler.compile(GrammarSource("regex", "first"))
    (child,) = children()  # which waits for another
    os.kill(child, signal.SIGSTOP)
    task = asyncio.create_task(compiler.compile(source))
    while not compiler._pool._busy:
        await asyncio.sleep(0)
    return task


async def test_while_one_compilation_is_stuck_others_go_on(compiler):
    hostile = await stuck(compiler)
    easy = [await compiler.compile(GrammarSource("regex", f"[a-z]{{{n + 1}}}")) for n in range(3)]
    assert len(set(easy)) == 3
    assert not hostile.done()
    hostile.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hostile


async def test_at_its_deadline_a_compilation_is_killed(compiler):
    with pytest.raises(DeadlineExceededError, match=r"within 0\.05 s") as caught:
        await compiler.compile(HOSTILE, timeout=0.05)
    assert caught.value.field == "grammar.regex"
    while children():
        await asyncio.sleep(0.01)
    assert await compiler.compile(EASY)


async def test_a_deadline_in_the_past_is_a_deadline(compiler):
    with pytest.raises(DeadlineExceededError):
        await compiler.compile(EASY, timeout=-1.0)


async def test_a_cancelled_call_kills_its_compilation(compiler):
    task = await stuck(compiler)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    while children():
        await asyncio.sleep(0.01)
    assert await compiler.compile(EASY)


async def test_callers_with_the_same_grammar_share_a_compilation_which_outlives_the_first(compiler):
    first = await stuck(compiler, EASY)
    others = [asyncio.create_task(compiler.compile(EASY)) for _ in range(3)]
    await asyncio.sleep(0)
    (child,) = children()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    os.kill(child, signal.SIGCONT)
    assert len(set(await asyncio.gather(*others))) == 1
    assert children() == {child}


async def test_a_compiler_that_dies_is_the_grammars_fault_and_the_next_one_compiles(compiler):
    task = await stuck(compiler)
    for child in children():
        os.kill(child, signal.SIGKILL)
    with pytest.raises(InvalidArgumentError) as caught:
        await task
    assert caught.value.field == "grammar.regex"
    assert await compiler.compile(EASY)


@pytest.mark.parametrize(
    "source",
    [
        GrammarSource("json_schema", '{"$ref": "#"}'),
        GrammarSource("json_schema", "[" * 500_000),
        GrammarSource("json_schema", '{"items":' * 50_000 + "{}" + "}" * 50_000),
        GrammarSource("json_schema", json.dumps({"properties": {f"p{n}": {"type": "null"} for n in range(20_000)}})),
        GrammarSource("regex", "(" * 100_000 + ")" * 100_000),
        GrammarSource("ebnf", "root ::= " + "(" * 100_000),
        GrammarSource("structural_tag", '{"format": ' * 10_000 + "1" + "}" * 10_000),
    ],
    ids=["endless", "brackets", "nested", "properties", "parentheses", "rules", "tag"],
)
async def test_hostile_sources_get_a_clear_error(compiler, source):
    with pytest.raises(InvalidArgumentError, match="the grammar") as caught:
        await compiler.compile(source)
    assert caught.value.field == f"grammar.{source.kind}"
    assert len(caught.value.message) < 600


async def test_a_source_over_the_limit_is_refused_without_being_read(compiler):
    with pytest.raises(InvalidArgumentError, match="52428802 bytes") as caught:
        await compiler.compile(GrammarSource("json_schema", '"' + "x" * 50 * (1 << 20) + '"'))
    assert caught.value.field == "grammar.json_schema"
    assert not children()


async def test_what_was_compiled_is_kept_within_its_bytes_and_the_least_used_goes_first():
    size = 2048
    compiler = GrammarCompiler(FINGERPRINT, (), CompilerLimits(timeout=60, cache_bytes=4 * size))
    try:
        sources = [GrammarSource("regex", f"{letter}{{1,9}}" + "[a-z]" * 200) for letter in "abcdefgh"]
        for source in sources:
            await compiler.compile(source)
            compiler.find(sources[0])  # in use all the time
            assert compiler.cached_bytes <= 4 * size
        assert compiler.find(sources[0]) is not None
        assert compiler.find(sources[-1]) is not None
        assert compiler.find(sources[1]) is None
    finally:
        await compiler.close()


async def test_a_grammar_larger_than_the_cache_is_compiled_and_not_kept():
    compiler = GrammarCompiler(FINGERPRINT, (), CompilerLimits(timeout=60, cache_bytes=100))
    try:
        assert await compiler.compile(EASY)
        assert compiler.cached_bytes == 0
        assert compiler.find(EASY) is None
    finally:
        await compiler.close()


async def test_too_long_a_queue_is_refused():
    pool = CompilePool((), size=1, max_queued=1)
    try:
        tasks = [asyncio.create_task(pool.compile(HOSTILE)) for _ in range(2)]
        await asyncio.sleep(0.01)
        with pytest.raises(ResourceExhaustedError) as caught:
            await pool.compile(EASY)
        assert caught.value.retry_after is not None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert await pool.compile(EASY)
    finally:
        await pool.close()


async def test_closing_leaves_no_process_behind():
    pool = CompilePool(())
    await pool.compile(EASY)
    assert children()
    await pool.close()
    assert not children()
