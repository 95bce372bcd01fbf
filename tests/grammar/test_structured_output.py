"""Whatever the model wants, a completed output matches its grammar: masks, sampler and matchers together.

The model is a stand-in: each step's logits are noise with a liking for short tokens and closing marks, so that outputs come to
an end. The vocabulary is the demo model's, 262 144 tokens.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from sapwood_common.contract.sampling import SamplingParams
from sapwood_kernels.ops.factory import device_ops
from sapwood_kernels.sampling.cpu_sampling import apply_token_bitmask
from sapwood_worker.model.grammar.backend import TokenMasks
from sapwood_worker.model.sampling.row_settings import RowSettings
from sapwood_worker.model.sampling.token_sampler import sample

MAX_TOKENS = 250
MOST_SEEDS = 10
"""After so many an output that has not come to its end is given up."""
ENDS = (1, 106)


class Noise:
    """Rows of logits: a fixed liking of each token plus noise from a seed."""

    def __init__(self, tokens: tuple[bytes, ...]) -> None:
        liking = np.zeros(len(tokens), np.float32)
        for index, token in enumerate(tokens):
            liking[index] = 2.0 * (len(token) <= 2) + 9.0 * (re.fullmatch(rb'["\]},]+', token) is not None)
            liking[index] -= 6.0 * (token.isspace() or token[:1] == b" ")
        liking[list(ENDS)] = 8.0
        self._liking = torch.from_numpy(liking)
        self._noise = torch.randn(len(tokens) + 4096, generator=torch.Generator().manual_seed(0)).mul_(2.0)

    def rows(self, offsets: list[int]) -> torch.Tensor:
        """float32 [R, V]."""
        return torch.stack([self._liking + self._noise[at : at + len(self._liking)] for at in offsets])


@pytest.fixture(scope="module")
def noise(demo_vocabulary) -> Noise:
    return Noise(demo_vocabulary.tokens)


def generate(store, vocabulary, noise: Noise, compiled: list[bytes], seed: int) -> list[tuple[bytes, bool]]:
    """Text of each grammar's output and whether it came to its end, all in one batch at temperature 1."""
    size = len(vocabulary.tokens)
    masks = TokenMasks(size)
    matchers = [store.build(each) for each in compiled]
    texts: list[bytearray] = [bytearray() for _ in compiled]
    params = SamplingParams(temperature=1.0, seed=seed)
    for step in range(MAX_TOKENS):
        running = [row for row, matcher in enumerate(matchers) if not matcher.finished]
        if not running:
            break
        pending = masks.start([matchers[row] for row in running])
        logits = noise.rows([(row * 613 + step * 71 + seed * 17) % 4096 for row in running])
        apply_token_bitmask(logits, torch.from_numpy(pending.result()))
        positions = np.array([step * 1000 + row for row in running], np.int64)
        settings = RowSettings(1, size, (), device_ops("cpu"))
        settings.enter(0, params, 0)
        chosen, _ = sample(logits, settings.sampling(np.zeros(len(running), np.int64), positions), device_ops("cpu"))
        for row, token in zip(running, chosen.tolist(), strict=True):
            assert matchers[row].accept(token), matchers[row].error
            if token not in ENDS:
                texts[row] += vocabulary.tokens[token]
    return [(bytes(text), matcher.finished) for text, matcher in zip(texts, matchers, strict=True)]


@pytest.mark.parametrize("group", [*range(3), *(pytest.param(group, marks=pytest.mark.slow) for group in range(3, 10))])
def test_each_of_the_hundred_schemas_is_completed_and_what_is_completed_validates(
    demo_store, demo_vocabulary, compile_grammar, noise, json_schemas, check_json, group
):
    """Each of them at least once, with one seed or another."""
    left = dict(list(json_schemas.items())[group * 10 : group * 10 + 10])
    compiled = {
        name: compile_grammar("json_schema", schema, vocabulary=demo_vocabulary) for name, schema in left.items()
    }
    for seed in range(MOST_SEEDS):
        outputs = generate(demo_store, demo_vocabulary, noise, [compiled[name] for name in left], seed)
        for name, (text, ended) in zip(tuple(left), outputs, strict=True):
            if ended:
                print(name, text.decode())
                check_json(text, left.pop(name))
        if not left:
            return
    raise AssertionError(f"{sorted(left)} never came to an end")


def test_compact_outputs_have_no_white_space_outside_strings(
    demo_store, demo_vocabulary, compile_grammar, noise, json_schemas, check_json
):
    names = ["objects.all_optional", "arrays.matrix", "numbers.latitude_longitude", "enums.typed"]
    compiled = [
        compile_grammar("json_schema", json_schemas[name], vocabulary=demo_vocabulary, any_whitespace=False)
        for name in names
    ]
    outputs = generate(demo_store, demo_vocabulary, noise, compiled, 3)
    for name, (text, ended) in zip(names, outputs, strict=True):
        assert ended
        assert not re.search(rb"\s", text)
        check_json(text, json_schemas[name])


PATTERNS = [
    r"[A-Z][a-z]{2,8} [A-Z][a-z]{2,8}",
    r"(\+\d{1,3} )?\d{3}-\d{4}",
    r"(19|20)\d\d-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])",
    r"#(?:[0-9a-f]{3}){1,2}",
    r"(?:[0-9]{1,3}\.){3}[0-9]{1,3}",
    r"yes|no|maybe",
    r"<b>[^<>]{1,20}</b>",
    r"[\u4e00-\u9fff]{2,6}",
]


def test_completed_outputs_of_regular_expressions_match(demo_store, demo_vocabulary, compile_grammar, noise):
    compiled = [compile_grammar("regex", pattern, vocabulary=demo_vocabulary) for pattern in PATTERNS]
    for seed in range(3):
        for pattern, (text, ended) in zip(
            PATTERNS, generate(demo_store, demo_vocabulary, noise, compiled, seed), strict=True
        ):
            assert ended
            assert re.fullmatch(pattern, text.decode()), (pattern, text)


ARITHMETIC = """
root ::= sum
sum ::= product (("+" | "-") product)*
product ::= factor (("*" | "/") factor)*
factor ::= [0-9] [0-9]? | "(" sum ")"
"""


def is_sum(text: str) -> bool:
    """A recursive-descent parser of the grammar above, written by hand."""

    def factor(at: int) -> int:
        if text[at : at + 1] == "(":
            at = chain(at + 1, "+-", lambda start: chain(start, "*/", factor))
            return at + 1 if at >= 0 and text[at : at + 1] == ")" else -1
        width = 2 if text[at : at + 2].isdigit() and len(text[at : at + 2]) == 2 else 1
        return at + width if text[at : at + width].isdigit() else -1

    def chain(at: int, operators: str, part) -> int:
        at = part(at)
        while at >= 0 and text[at : at + 1] and text[at] in operators:
            at = part(at + 1)
        return at

    return chain(0, "+-", lambda start: chain(start, "*/", factor)) == len(text)


def test_the_hand_parser_knows_sums_from_what_is_none():
    assert all(map(is_sum, ("1", "12+3", "(1-2)*3/(4)", "((7))")))
    assert not any(map(is_sum, ("", "123", "1+", "(1", "1)", "a", "1 +2", "()")))


def test_completed_outputs_of_rules_are_derived_by_them(demo_store, demo_vocabulary, compile_grammar, noise):
    compiled = [compile_grammar("ebnf", ARITHMETIC, vocabulary=demo_vocabulary)] * 12
    outputs = generate(demo_store, demo_vocabulary, noise, compiled, 1)
    ended = [text.decode() for text, end in outputs if end]
    assert len(ended) >= 6
    for text in ended:
        assert is_sum(text), text


def test_calls_in_free_text_hold_what_their_schema_says(
    demo_store, demo_vocabulary, compile_grammar, noise, check_json
):
    schema = {
        "type": "object",
        "properties": {"x": {"type": "integer"}},
        "required": ["x"],
        "additionalProperties": False,
    }
    tag = {
        "format": {
            "type": "tags_with_separator",
            "tags": [{"begin": "<call>", "content": {"type": "json_schema", "json_schema": schema}, "end": "</call>"}],
            "separator": "\n",
            "at_least_one": True,
        }
    }
    compiled = [compile_grammar("structural_tag", tag, vocabulary=demo_vocabulary)] * 4
    for text, ended in generate(demo_store, demo_vocabulary, noise, compiled, 5):
        calls = re.findall(rb"<call>(.*?)</call>", text, re.DOTALL)
        assert calls or not ended
        for call in calls:
            check_json(call, schema)
