"""Compiled grammars of tokenizers of other versions: their source is compiled here, and nobody is refused."""

from __future__ import annotations

import hashlib
import json

import pytest

from sapwood.v1 import worker_pb2
from sapwood_common.errors import InvalidArgumentError
from sapwood_common.grammar.artefact import ArtefactError, GrammarArtefact
from sapwood_common.grammar.compiler import CompilerLimits
from sapwood_common.grammar.source import GrammarOptions, GrammarSource
from sapwood_worker.front.served_model import RequestGrammars
from sapwood_worker.records.model_info import ModelInfo

FINGERPRINT = bytes(range(16))
SOURCE = GrammarSource("regex", "a{3}b", GrammarOptions())
INFO = ModelInfo(
    architecture="fake",
    dtype="none",
    context_length=64,
    vocab_size=100,
    eos_token_ids=(),
    page_size=4,
    num_pages=16,
    vocabulary_fingerprint=FINGERPRINT,
)


def of_version(version: bytes, body: bytes, fingerprint: bytes = FINGERPRINT) -> bytes:
    checksum = hashlib.blake2b(body, digest_size=8).digest()
    return b"".join((b"SWG", version, bytes(16), fingerprint, checksum, body))


NEWER = json.dumps(["another syntax", SOURCE.kind, SOURCE.text, True, False, {"more": 1}]).encode()


async def compiled(raw: bytes) -> bytes:
    grammars = RequestGrammars(INFO, CompilerLimits())
    request = worker_pb2.WorkerGenerateRequest()
    request.grammar.compiled = raw
    try:
        return await grammars.compiled(request, 60.0)
    finally:
        await grammars.close()


@pytest.mark.parametrize("version", [b"1", b"3", b"\xff"])
async def test_a_grammar_of_another_version_is_compiled_from_its_source(version: bytes) -> None:
    found = GrammarArtefact.from_bytes(await compiled(of_version(version, NEWER)))
    assert found.current
    assert found.source.text == SOURCE.text
    assert found.lark and found.lark != "another syntax"


async def test_a_grammar_of_this_version_is_taken_as_it_is() -> None:
    raw = GrammarArtefact.of(SOURCE, FINGERPRINT, "start: /a{3}b/").to_bytes()
    assert await compiled(raw) == raw


@pytest.mark.parametrize(
    "raw",
    [
        of_version(b"3", NEWER, bytes(16)),
        of_version(b"3", b"[1]"),
        of_version(b"3", b"{"),
        of_version(b"3", NEWER)[:-1],
        b"PK" + NEWER,
    ],
    ids=["another vocabulary", "no source", "no JSON", "cut", "something else"],
)
async def test_what_is_no_grammar_of_any_version_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match=r"grammar\.compiled"):
        await compiled(raw)


def test_the_released_version_reads_what_is_written_now() -> None:
    """4f468ab2 and its like read ``SWG2`` with five fields and nothing else."""
    raw = GrammarArtefact.of(SOURCE, FINGERPRINT, "start: /a/").to_bytes()
    assert raw.startswith(b"SWG2")
    assert len(json.loads(raw[44:])) == 5
    with pytest.raises(ArtefactError):
        GrammarArtefact.from_bytes(b"")
