"""Strict schemas with fixed keys on the demo model, greedily: jump-forward takes fewer steps and gives the same tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sapwood.cli.model import fetch_packaged
from sapwood_common.contract.sampling import SamplingParams
from sapwood_testing.worker.model_scheduler import scheduler_for
from sapwood_tokenizer.vocab.loader import load_tokenizer, resolve_tokenizer
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.model.grammar.backend import TokenMasks
from sapwood_worker.model.grammar.llguidance import GrammarStore
from sapwood_worker.model.runner.builder import build_runner
from sapwood_worker.model.runner.options import RunnerOptions

pytestmark = [pytest.mark.model, pytest.mark.slow]


def closed(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "required": [*properties], "additionalProperties": False,
    }  # fmt: skip


NAME = {"type": "string", "maxLength": 12}
SCHEMAS = {
    "person": closed(name=NAME, age={"type": "integer", "minimum": 0, "maximum": 120}, city=NAME),
    "order": closed(
        customer_first_name=NAME,
        customer_last_name=NAME,
        payment_method={"enum": ["credit card", "cash", "transfer"]},
        total_amount={"type": "number"},
        is_paid={"type": "boolean"},
    ),
    "place": closed(
        location=closed(latitude={"type": "integer"}, longitude={"type": "integer"}),
        kind={"enum": ["park", "river", "museum"]},
    ),
    "opinion": closed(
        sentiment={"enum": ["positive", "negative", "neutral"]},
        confidence={"type": "integer", "minimum": 0, "maximum": 100},
        explanation=NAME,
    ),
    "flags": closed(is_animal={"type": "boolean"}, is_plant={"type": "boolean"}, is_mineral={"type": "boolean"}),
}
PROMPT = "The first order of today, as JSON:\n"


@pytest.fixture(scope="module")
def run() -> Any:
    """Runs a request with a schema; its tokens, the steps that it took, and the forced tokens."""
    options = RunnerOptions(
        model_path=fetch_packaged("demo"), num_pages=256, max_running=4, threads=2, structured_output=True
    )
    runner = build_runner(options)
    info = runner.info
    store = GrammarStore(runner.vocabulary, info.vocab_size, info.eos_token_ids)
    prompt = load_tokenizer(resolve_tokenizer("demo")).tokenizer.encode(PROMPT, add_special_tokens=False).ids

    def run(compiled: bytes, *, jump_forward: bool) -> tuple[list[int], int, int]:
        scheduler = scheduler_for(
            info,
            masks=TokenMasks(info.vocab_size),
            context_length=512,
            eos_token_ids=frozenset(info.eos_token_ids),
            max_running=4,
            jump_forward=jump_forward,
            speculate="off",
        )
        sampling = SamplingParams(temperature=0.0, max_tokens=150)
        request = Request(0, "r", prompt, sampling, grammar=store.build(compiled))
        scheduler.add(request)
        steps = 0
        while scheduler.has_work:
            scheduler.update(runner.execute(scheduler.schedule()))
            steps += 1
        return request.token_ids[request.prompt_length :].tolist(), steps, scheduler.load().forced_tokens

    run.vocabulary = runner.vocabulary  # type: ignore[attr-defined]
    return run


@pytest.mark.parametrize("any_whitespace", [False, True])
@pytest.mark.parametrize("name", SCHEMAS)
def test_jump_forward_saves_a_quarter_of_the_steps_and_changes_no_token(name, any_whitespace, run, compile_grammar):
    vocabulary = run.vocabulary
    compiled = compile_grammar("json_schema", SCHEMAS[name], vocabulary=vocabulary, any_whitespace=any_whitespace)
    plain, steps, none = run(compiled, jump_forward=False)
    forced, fewer, saved = run(compiled, jump_forward=True)
    assert forced == plain
    assert (
        json.loads(b"".join(vocabulary.tokens[token] for token in plain)).keys() == SCHEMAS[name]["properties"].keys()
    )
    assert none == 0 and fewer == steps - saved
    assert fewer <= 0.75 * steps
