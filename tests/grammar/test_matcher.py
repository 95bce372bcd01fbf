"""A request's place in its grammar: masks, ends, going back and continuing."""

from __future__ import annotations

import itertools
import random
import string

import numpy as np
import pytest

from sapwood_common.errors import InvalidArgumentError
from sapwood_common.grammar.vocabulary import TokenVocabulary
from sapwood_worker.model.grammar.backend import only_token
from sapwood_worker.model.grammar.llguidance import GrammarStore


def words_of(store_size: int) -> int:
    return -(-store_size // 32)


def allowed(matcher, words: int) -> set[int]:
    mask = np.zeros(words, np.int32)
    matcher.fill(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


@pytest.fixture
def words(vocabulary: TokenVocabulary) -> int:
    return words_of(len(vocabulary.tokens) + 13)


def test_a_mask_holds_every_token_that_fits_whatever_its_length(store, compile_grammar, vocabulary, words):
    matcher = store.build(compile_grammar("regex", "the name|then"))
    fitting = {i for i, token in enumerate(vocabulary.tokens) if token and b"the name".startswith(token)}
    assert allowed(matcher, words) == fitting
    assert matcher.accept(vocabulary.tokens.index(b"the"))
    assert allowed(matcher, words) == {ord("n"), ord(" ")}


def test_only_the_end_may_follow_a_complete_text(store, compile_grammar, words, end_token):
    matcher = store.build(compile_grammar("regex", "ab?"))
    assert end_token not in allowed(matcher, words)
    assert matcher.accept(ord("a"))
    assert not matcher.finished
    assert allowed(matcher, words) == {ord("b"), end_token}
    assert matcher.accept(ord("b"))
    assert matcher.finished
    assert not matcher.error


def test_the_end_token_finishes_where_more_was_allowed(store, compile_grammar, end_token):
    matcher = store.build(compile_grammar("regex", "a+"))
    assert matcher.accept(ord("a"))
    assert matcher.accept(end_token)
    assert matcher.finished
    assert not matcher.error


def test_special_tokens_and_ids_beyond_the_vocabulary_are_never_text(store, compile_grammar, words, end_token):
    matcher = store.build(compile_grammar("regex", r"(.|\n)*"))
    found = allowed(matcher, words)
    assert end_token in found
    assert max(found) == end_token


def test_a_token_that_does_not_fit_is_an_error_that_stays(store, compile_grammar, words, end_token):
    matcher = store.build(compile_grammar("regex", "ab"))
    assert not matcher.accept(ord("x"))
    assert matcher.error
    assert matcher.finished
    assert allowed(matcher, words) == {end_token}


@pytest.mark.parametrize("count", range(1, 8))
def test_tokens_are_taken_back(store, compile_grammar, words, end_token, count):
    matcher = store.build(compile_grammar("json_schema", {"enum": [{"a": 1}]}, any_whitespace=False))
    masks = []
    for token in b'{"a":1}':
        masks.append(allowed(matcher, words))
        assert matcher.accept(token)
    matcher.rollback(count)
    assert not matcher.finished
    assert allowed(matcher, words) == masks[-count]
    assert matcher.accept_all(b'{"a":1}'[-count:]) == count
    assert matcher.finished


def test_drafted_tokens_are_checked_without_moving(store, compile_grammar):
    matcher = store.build(compile_grammar("regex", "abc"))
    assert matcher.validate([*b"abx"]) == 2
    assert matcher.validate([*b"abc"]) == 3
    assert matcher.accept(ord("a"))


def test_a_forced_token_is_named(store, compile_grammar, words):
    matcher = store.build(compile_grammar("regex", "x[yz]"))
    mask = np.zeros(words, np.int32)
    matcher.fill(mask)
    assert only_token(mask) == ord("x")
    matcher.accept(ord("x"))
    matcher.fill(mask)
    assert only_token(mask) is None


def test_a_request_goes_on_from_tokens_generated_before(store, compile_grammar, words):
    compiled = compile_grammar("json_schema", {"type": "array", "items": {"type": "integer"}})
    text = [*b"[1, 23,"]
    walked = store.build(compiled)
    assert walked.accept_all(text) == len(text)
    resumed = store.build(compiled, text)
    assert allowed(resumed, words) == allowed(walked, words)


def test_tokens_from_before_that_do_not_fit_are_refused(store, compile_grammar):
    with pytest.raises(InvalidArgumentError, match="only the first 1") as caught:
        store.build(compile_grammar("regex", "ab"), [*b"ax"])
    assert caught.value.field == "output_tokens"


def test_a_grammar_of_another_vocabulary_is_refused(store, compile_grammar):
    other = TokenVocabulary((b"a", b"b"), frozenset())
    with pytest.raises(InvalidArgumentError, match="another vocabulary") as caught:
        store.build(compile_grammar("regex", "a", vocabulary=other))
    assert caught.value.field == "grammar.compiled"


def test_a_damaged_grammar_is_refused(store, compile_grammar):
    with pytest.raises(InvalidArgumentError, match="damaged"):
        store.build(compile_grammar("regex", "a")[:-1])


def test_what_a_request_leaves_behind_serves_the_next_from_the_start(store, compile_grammar, words):
    compiled = compile_grammar("regex", "ab|cd")
    first = store.build(compiled)
    fresh = allowed(first, words)
    assert first.accept_all([*b"ab"]) == 2
    first.close()
    for _ in range(2):
        matcher = store.build(compiled)
        assert allowed(matcher, words) == fresh
        assert matcher.accept(ord("c"))


def test_requests_of_one_grammar_do_not_disturb_each_other(store, compile_grammar, words):
    compiled = compile_grammar("regex", "ab|cd")
    one, other = store.build(compiled), store.build(compiled)
    assert one.accept(ord("a"))
    assert other.accept(ord("c"))
    assert allowed(one, words) == {ord("b")}
    assert allowed(other, words) == {ord("d")}


def test_only_so_many_grammars_are_kept(vocabulary, compile_grammar):
    store = GrammarStore(vocabulary, len(vocabulary.tokens), (), max_kept=3)
    for letter in "abcdef":
        store.build(compile_grammar("regex", letter)).close()
    assert store.num_kept == 3


def test_a_model_without_end_tokens_ends_where_nothing_may_follow(make_store, vocabulary, compile_grammar, words):
    store = make_store(vocabulary, 32 * words, ())
    matcher = store.build(compile_grammar("regex", "ab"))
    assert matcher.accept_all([*b"ab"]) == 2
    assert matcher.finished


def test_masks_have_room_for_the_end_that_a_model_without_one_is_given(make_store, vocabulary, compile_grammar, words):
    store = make_store(vocabulary, 32 * words, ())
    matchers = [store.build(compile_grammar("regex", "a+")) for _ in range(2)]
    alone, both = (store.masks().start(matchers[:count]).result() for count in (1, 2))
    assert np.array_equal(alone[0], both[0])
    assert matchers[0].accept(ord("a"))
    assert matchers[0].forced() is None


def test_a_grammar_whose_work_explodes_ends_in_an_error_and_not_in_a_hang(
    vocabulary, end_token, compile_grammar, words
):
    store = GrammarStore(vocabulary, 32 * words, (end_token,))
    matcher = store.build(compile_grammar("regex", "((a{1,100}){1,100}){1,100}b"))
    for _ in range(2000):
        allowed(matcher, words)
        if not matcher.accept(ord("a")):
            break
    assert "lexer" in matcher.error or matcher.complete is False


AMBIGUOUS = {
    "in threes": 'root ::= s\ns ::= s s s | "a" | "b" | ""',
    "around": "root ::= s\ns ::= [a-z] s [a-z] | [a-z] s | s [a-z] | [a-z]",
    "palindromes": 'root ::= s\ns ::= [a-z] s [a-z] s [a-z] | [a-z] s | s s | ""',
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_rules_that_match_in_many_ways_end_in_an_error_before_their_masks_take_long(compile_grammar, name: str) -> None:
    triples = [bytes(letters) for letters in itertools.product(string.ascii_lowercase.encode(), repeat=3)]
    many = TokenVocabulary(
        (*(bytes([byte]) for byte in range(256)), *triples, b"<|end|>"), frozenset({256 + len(triples)})
    )
    store = GrammarStore(many, len(many.tokens), (len(many.tokens) - 1,))
    matcher = store.build(compile_grammar("ebnf", AMBIGUOUS[name], vocabulary=many))
    draw, taken = random.Random(1), 0
    letters = [*range(ord("a"), ord("c")), *range(256, 256 + len(triples))]
    while not matcher.error and taken < 300:
        mask = allowed(matcher, store._words)
        fits = [token for token in letters if token in mask]
        taken += bool(fits) and matcher.accept(draw.choice(fits))
        if not fits:
            break
    assert "items" in matcher.error
    assert taken < 150, taken


def test_a_thousand_alternatives_have_room(vocabulary, end_token, compile_grammar, words) -> None:
    store = GrammarStore(vocabulary, 32 * words, (end_token,))
    tools = [
        {"type": "object", "properties": {"name": {"const": f"tool {number}"}}, "required": ["name"]}
        for number in range(1000)
    ]
    matcher = store.build(compile_grammar("json_schema", {"anyOf": tools}))
    assert matcher.accept(ord("{"))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_masks_of_a_batch_equal_those_of_each_alone(store, compile_grammar, words, count):
    patterns = ["a+", "[0-9]{2}", "the|then", '"[^"]*"', "x?y"]
    matchers = [store.build(compile_grammar("regex", pattern)) for pattern in patterns[:count]]
    masks = store.masks()
    for _ in range(2):
        rows = masks.start(matchers).result()
        assert rows.shape == (count, words)
        for matcher, row in zip(matchers, rows, strict=True):
            alone = np.zeros(words, np.int32)
            matcher.fill(alone)
            assert np.array_equal(row, alone)
