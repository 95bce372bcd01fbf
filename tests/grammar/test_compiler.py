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
from sapwood_common.grammar.compiler import CompilePool, CompilerLimits, GrammarCompiler
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
    """Process ids of the compile processes that are alive: children of the fork server, which is this process's child."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
            if stat[0] != "Z" and "compile_process" in (entry / "cmdline").read_text():
                parents[int(entry.name)] = int(stat[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return {pid for pid, parent in parents.items() if parents.get(parent) == os.getpid()}


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
    while not compiler._pool._pool._busy:
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


def chain(count: int, last: dict[str, object]) -> dict[str, object]:
    """A schema of references, each to the one before: a fixed point that goes over all of them each time takes minutes."""
    links = {f"d{n}": {"$ref": f"#/$defs/d{n - 1}"} for n in range(count, 0, -1)}
    return {"$defs": {**links, "d0": last}, "$ref": f"#/$defs/d{count}"}


async def test_long_chains_of_references_are_followed_once(compiler):
    assert await compiler.compile(GrammarSource("json_schema", json.dumps(chain(9_000, {"type": "integer"}))))
    wide = {
        "$defs": {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(9_000)} | {"d9000": {}},
        "type": "object",
        "properties": {f"p{n}": {"$ref": f"#/$defs/d{n}"} for n in range(0, 9_000, 100)},
        "required": [f"p{n}" for n in range(0, 9_000, 100)],
    }
    assert await compiler.compile(GrammarSource("json_schema", json.dumps(wide)))
    endless = GrammarSource("json_schema", json.dumps(chain(9_000, {"$ref": "#/$defs/d9000"})))
    with pytest.raises(InvalidArgumentError, match="no end"):
        await compiler.compile(endless)


def hostile(kind: str, number: int) -> GrammarSource:
    """A grammar whose compilation takes seconds, another one for each number."""
    words = [str(one * 7919 + number) for one in range(60_000)]
    match kind:
        case "regex":
            return GrammarSource("regex", "|".join(words), salt="alice")
        case "ebnf":
            return GrammarSource("ebnf", "start: " + " | ".join(f'"{word}"' for word in words), salt="alice")
        case "json_schema":
            return GrammarSource("json_schema", json.dumps({"enum": words}), salt="alice")
    tag = {"format": {"type": "or", "elements": [{"type": "const_string", "value": word} for word in words[:20_000]]}}
    return GrammarSource("structural_tag", json.dumps(tag), salt="alice")


@pytest.mark.parametrize("kind", ["json_schema", "regex", "ebnf", "structural_tag"])
async def test_a_tenants_hostile_grammars_stop_no_other_tenants(compiler, kind):
    flood = [asyncio.create_task(compiler.compile(hostile(kind, number))) for number in range(16)]
    await asyncio.sleep(0.1)
    for number in range(3):
        source = GrammarSource("json_schema", json.dumps({"const": number}), salt="bob")
        assert await compiler.compile(source)
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)


async def test_the_error_of_a_grammar_that_had_to_wait_says_so():
    compiler = GrammarCompiler(FINGERPRINT, (), CompilerLimits(timeout=0.4, processes=1))
    try:
        compiler._pool._pool._free = 0  # as if all places were taken
        with pytest.raises(ResourceExhaustedError, match=r"waited 0\.4 s for other grammars and ran 0 s") as caught:
            await compiler.compile(EASY)
        assert caught.value.retry_after is not None
        assert caught.value.field == "grammar.regex"
        with pytest.raises(DeadlineExceededError, match=r"waited 0\.1 s for other grammars"):
            await compiler.compile(EASY, timeout=0.1)
    finally:
        await compiler.close()
