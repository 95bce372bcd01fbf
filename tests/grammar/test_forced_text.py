"""Text that a grammar forces: its tokens are the tokenizer's own, the model checks them as drafts, and no answer changes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sapwood_common.grammar.vocabulary import load_vocabulary
from sapwood_tokenizer.vocab.loader import load_tokenizer, resolve_tokenizer
from sapwood_worker.model.grammar.backend import Spellings
from sapwood_worker.model.grammar.json_layout import JsonLayout
from tests.grammar.test_scheduling import PROMPT, constrained, make_runner, make_scheduler, text_of

PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["the", "name"]}, "is true": {"type": "boolean"}, "the name": {"const": "null"}},
    "required": ["name", "is true", "the name"],
    "additionalProperties": False,
}
FORCED = (
    '{"name":"', '","age":', '":"', 'customer_first_name": "', '"},"payment_method":"', '"shipping_address": {', "true}",
    "<tool_call>", '"Überweisung": ', "https://example.org/",
)  # fmt: skip


def answers(vocabulary, end_token, compiled: bytes, store, **settings: Any) -> tuple[list[list[int]], int, int]:
    """The tokens of eight requests, the steps that they took, and the tokens that were forced."""
    scheduler, runner = make_scheduler(vocabulary, end_token, 400, **settings), make_runner(vocabulary, end_token, 400)
    requests = [constrained(store, compiled, serial, [*PROMPT, serial]) for serial in range(8)]
    for request in requests:
        scheduler.add(request)
    steps = 0
    while scheduler.has_work:
        scheduler.update(runner.execute(scheduler.schedule()))
        scheduler.check()
        steps += 1
    return [request.token_ids.tolist() for request in requests], steps, scheduler.load().forced_tokens


@pytest.mark.parametrize("speculate", ["off", "auto", "prefix"])
@pytest.mark.parametrize("max_step_tokens", [512, 20])
def test_drafts_of_forced_text_save_steps_and_change_no_token(
    store, compile_grammar, vocabulary, end_token, speculate, max_step_tokens
):
    compiled = compile_grammar("json_schema", json.dumps(PERSON), any_whitespace=False)
    settings = {"speculate": speculate, "max_step_tokens": max_step_tokens}
    plain, steps, forced = answers(vocabulary, end_token, compiled, store, jump_forward=False, **settings)
    drafted, fewer, saved = answers(vocabulary, end_token, compiled, store, jump_forward=True, **settings)
    assert drafted == plain
    assert json.loads(text_of(vocabulary, drafted[0][len(PROMPT) + 1 :]).removesuffix("<|end|>"))["the name"] == "null"
    assert forced == 0 < saved
    assert fewer < steps


def test_a_request_that_wants_no_drafts_gets_none(store, compile_grammar, vocabulary, end_token):
    scheduler, runner = make_scheduler(vocabulary, end_token, 400), make_runner(vocabulary, end_token, 400)
    compiled = compile_grammar("regex", "the name is [0-9]")
    scheduler.add(constrained(store, compiled, 0, PROMPT, speculate=False, logprobs=0))
    while scheduler.has_work:
        scheduler.update(runner.execute(scheduler.schedule()))
    assert scheduler.load().forced_tokens == 0


@pytest.mark.parametrize("model", ["demo", "demo-base"])
def test_forced_text_is_cut_as_the_tokenizer_cuts_it(model):
    path = resolve_tokenizer(model)
    vocabulary = load_vocabulary(path)
    assert vocabulary is not None
    known = [b"" if index in vocabulary.special_ids else token for index, token in enumerate(vocabulary.tokens)]
    spellings = Spellings(known)
    tokenizer = load_tokenizer(path).tokenizer
    for text in FORCED:
        expected = tokenizer.encode(text, add_special_tokens=False).ids
        assert list(spellings.cut(text.encode())) == expected, text


@given(st.binary(max_size=80))
def test_the_tokens_of_any_bytes_spell_their_beginning(text: bytes):
    tokens = [*(bytes([byte]) for byte in range(255)), b"ab", b"abc", b"  ", b"ca", b"the"]
    cut = Spellings(tokens).cut(text)
    joined = b"".join(tokens[token] for token in cut)
    assert text.startswith(joined)
    assert len(joined) == min(64, len(text)) or text[len(joined)] == 255


def drafted(state: Any, output: list[int], most: int = 9) -> list[int]:
    return state.guess(most, [*PROMPT, *output], len(PROMPT))


def test_text_that_a_model_cut_its_own_way_is_guessed_that_way_the_next_time(make_store, compile_grammar, vocabulary):
    store = make_store(vocabulary, len(vocabulary.tokens) + 13, (256 + 15,), timeout=29.0)  # which has learned nothing
    compiled = compile_grammar("regex", "the name is [0-9]")
    state = store.build(compiled)
    words = [*vocabulary.tokens]
    own = [words.index(b"the"), *b" ", words.index(b"name"), *b" is", *b" "]
    assert drafted(state, []) != own[:9]
    for end in (1, 4, 5, 6, 7, 8, 9):  # as steps bring them
        for token in own[end - 1 : end] if end not in (1, 4) else own[max(0, end - 3) : end]:
            assert state.accept(token)
        drafted(state, own[:end])
    assert drafted(store.build(compiled), []) == own[:9]


def test_white_space_is_drafted_as_it_was_written_before_the_last_member(store, compile_grammar, vocabulary):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}, "c": {"type": "boolean"}},
        "required": ["a", "b", "c"],
        "additionalProperties": False,
    }
    state = store.build(compile_grammar("json_schema", schema))
    text = b'{\n  "a": 1,\n  "b": 2,'
    for token in text:
        assert state.accept(token)
    draft = drafted(state, [*text], 20)
    spelt = b"".join(vocabulary.tokens[token] for token in draft)
    assert spelt.startswith(b'\n  "c"')
    assert state.accept(10), "a draft leaves the grammar where it was"


@given(
    st.lists(
        st.sampled_from([b"{", b'"a"', b":", b" ", b"\n", b"\\", b'"', b",", b"}", b"[", b"x", b"\xc3"]), max_size=40
    )
)
def test_a_layout_guesses_only_white_space_and_openings_for_any_text(parts: list[bytes]):
    tokens = [bytes([byte]) for byte in range(256)] + [b'"a"']
    layout = JsonLayout(tokens, {})
    for part in parts:
        layout.read(256 if part == b'"a"' else part[0])
        assert layout.place.depth >= 0
        for guess in layout.guesses(layout.place):
            assert 0 < len(guess) <= 9
            assert set(b"".join(tokens[token] for token in guess)) <= set(b' \n{["')
