"""Decodes that run from a recording against those whose layers are called one by one."""

from __future__ import annotations

import pytest

from sapwood_common.contract.sampling import SamplingParams
from sapwood_kernels.native.products import load_library
from sapwood_testing.models.gguf_files import write_gguf

pytestmark = pytest.mark.skipif(load_library() is None, reason="nothing is compiled: python hatch_build.py")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8}
NAMES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "token_embd", "output")
PROMPTS = {slot: [3 + (slot * 11 + i * 7) % 90 for i in range(5 + 13 * slot)] for slot in range(3)}


@pytest.fixture
def runners(tiny_model, make_runner, tmp_path):
    """Makes a runner of a tiny model in Q8_0 that records, and one that does not."""

    def make(name: str, *wide: str, **options):
        kinds = {each: "Q8_0" for each in NAMES if each not in wide}
        path = write_gguf(tmp_path / "model.gguf", tiny_model(name, **SIZES).oracle, name, kinds=kinds)
        return [make_runner(path, cuda_graphs=records, **options) for records in (True, False)]

    return make


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["gemma3", "llama"])  # with windows and norms behind; sums in the residual's place
def test_tokens_are_the_same_and_steps_were_run_from_recordings(runners, make_driver, name, threads):
    recording, plain = runners(name, threads=threads)
    settings = {0: SamplingParams(temperature=0.0), 1: SamplingParams(temperature=1.0, seed=3), 2: SamplingParams()}
    for prompts in (PROMPTS, {1: PROMPTS[1]}, PROMPTS):
        expected = make_driver(plain).generate(prompts, 40, settings)
        assert make_driver(recording).generate(prompts, 40, settings) == expected
    # The first decode of three tokens and that of one are those that are recorded.
    assert recording.recorded.runs == 3 * 39 - 2
    assert recording.recorded.refused is None
    assert plain.recorded is None


def test_prompts_and_decodes_beside_them_are_not_run_from_recordings(runners, make_driver):
    recording, plain = runners("gemma3")
    answers = []
    for runner in (recording, plain):
        driver = make_driver(runner)
        driver.generate({0: PROMPTS[0]}, 4)
        before = None if runner.recorded is None else runner.recorded.runs
        driver.add(1, PROMPTS[1])
        driver.execute({0: 1, 1: len(PROMPTS[1])})
        if before is not None:
            assert runner.recorded.runs == before == 2
        for _ in range(5):
            driver.execute({0: 1, 1: 1})
        answers.append((driver.tokens[0], driver.tokens[1]))
    assert answers[0] == answers[1]


def test_a_model_that_computes_by_torch_says_what(runners, make_driver):
    recording, plain = runners("llama", "ffn_down")
    expected = make_driver(plain).generate(PROMPTS, 6)
    assert make_driver(recording).generate(PROMPTS, 6) == expected
    assert recording.recorded.runs == 0
    assert recording.recorded.refused is not None


def test_a_recording_that_lacks_calls_is_found_out_and_not_used(runners, make_driver, monkeypatch):
    recording, plain = runners("llama")
    # Layers call another library than the one that is watched, as where a model was loaded with other operations.
    monkeypatch.setattr(recording.recorded, "_library", load_library())
    expected = make_driver(plain).generate(PROMPTS, 6)
    assert make_driver(recording).generate(PROMPTS, 6) == expected
    assert recording.recorded.runs == 0
    assert recording.recorded.refused == "a recording gave other numbers"
