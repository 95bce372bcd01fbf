"""Small steps as rows of a decode graph: the rows are those of the step; on a GPU, they compute what a prefill computes."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood_common.contract.sampling import SamplingParams
from sapwood_kernels.ops.factory import device_ops
from sapwood_testing.worker.steps import Part, make_step, step_for
from sapwood_worker.model.runner.builder import build_runner
from sapwood_worker.model.runner.forward_batch import build_forward_batch
from sapwood_worker.model.runner.graphs.decode_rows import MOST_KEYS, decode_rows
from sapwood_worker.model.runner.options import RunnerOptions
from sapwood_worker.model.sampling.positions import Positions

GREEDY = SamplingParams(temperature=0.0)
PAGE = 16


def part(slot: int, tokens: list[int], start: int, samples: bool = True) -> Part:
    return Part(slot, tokens, start, samples, GREEDY)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 90), st.booleans()), min_size=1, max_size=6))
def test_the_rows_are_the_tokens_that_a_prefill_would_compute(shapes: list[tuple[int, int, bool]]):
    requests = [part(i, [10 * i + j for j in range(n)], start, samples) for i, (n, start, samples) in enumerate(shapes)]
    table = np.random.default_rng(0).permutation(6 * 7).astype(np.int32).reshape(6, 7)
    step = make_step(0, table, requests)
    batch = build_forward_batch(step, PAGE, device_ops("cpu"))
    rows = decode_rows(step, PAGE, most_rows=64, most_pages=1000)
    assert rows is not None
    assert rows.token_ids.tolist() == batch.token_ids.tolist()
    assert rows.positions.tolist() == batch.positions.tolist()
    assert (rows.pages == table[rows.slots]).all()
    pages = rows.pages[range(len(rows.slots)), rows.positions // PAGE]
    assert (pages * PAGE + rows.positions % PAGE).tolist() == batch.attention.cache_slots.tolist()
    everything = range(len(rows.token_ids))
    assert list(everything if rows.last is None else rows.last) == step.sampled().tolist()


def test_the_end_of_a_prompt_is_sampled_after_once_more_for_each_request_that_joins():
    table = np.arange(12, dtype=np.int32).reshape(2, 6)
    for parts, expected in (
        ([part(0, [5], 3), part(1, [6], 9)], [0, 1, 1, 1]),
        ([part(0, [5], 3), part(1, [6, 7], 9)], [0, 2, 2, 2]),
        ([part(0, [5, 6, 7, 8], 3, samples=False), part(1, [6], 9)], [4, 4, 4]),
    ):
        step = make_step(0, table, parts)
        step.joins = np.array([(7, 1), (4, 1)])
        rows = decode_rows(step, PAGE, most_rows=64, most_pages=1000)
        assert rows is not None and rows.last is not None
        assert rows.last.tolist() == step.sampled().tolist() == expected
        at = Positions.of(step)
        assert at.rows.tolist() == [*step.rows[step.samples > 0].tolist(), 7, 4]
        assert at.positions.tolist()[-3:] == [9 + len(parts[1].token_ids)] * 3
        assert list(at.parts)[-2:] == [2, 3]


def test_what_does_not_fit_or_would_read_too_many_keys_is_left_to_prefill():
    decodes = [part(0, [-1], 5000), part(1, [-1], 5000)]
    chunk = part(2, list(range(12)), 400)
    most = MOST_KEYS // 28
    table = np.zeros((3, most), np.int32)
    sizes = {"most_rows": 16, "most_pages": 2000}
    assert decode_rows(make_step(0, table, [*decodes, chunk]), PAGE, **sizes) is not None
    assert decode_rows(make_step(0, table, [*decodes, chunk]), PAGE, **sizes, prompts=False) is None
    assert decode_rows(make_step(0, table, decodes), PAGE, **sizes, prompts=False) is not None
    assert decode_rows(make_step(0, table, [*decodes, chunk]), PAGE, most_rows=13, most_pages=2000) is None
    assert decode_rows(make_step(0, table, [*decodes, chunk]), PAGE, most_rows=16, most_pages=900) is None
    longer = make_step(0, table, [part(2, list(range(12)), most // 12)])
    wide = {"most_rows": 16, "most_pages": 1 << 20}
    assert decode_rows(longer, PAGE, **wide) is None
    assert decode_rows(longer, PAGE, **wide, layers=1) is not None
    draft = make_step(0, table, [Part(2, list(range(12)), most // 12, 12, GREEDY)])
    assert decode_rows(draft, PAGE, **wide) is not None


def test_rows_of_prompts_are_told_from_decodes_and_drafts():
    table = np.zeros((3, 64), np.int32)
    draft = Part(0, [7, 8, 9], 40, 3, GREEDY)
    rows = decode_rows(make_step(0, table, [draft, part(1, [-1], 60)]), PAGE, most_rows=16, most_pages=900)
    assert rows is not None and rows.prompts is None
    step = make_step(0, table, [draft, part(1, [1, 2], 60), part(2, [3], 0, samples=False)])
    rows = decode_rows(step, PAGE, most_rows=16, most_pages=900)
    assert rows is not None and rows.prompts is not None
    assert rows.prompts.tolist() == [False, False, False, True, True, True]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("cache", ["auto", "fp8_e4m3"])
def test_on_a_gpu_parts_of_prompts_in_a_decode_graph_give_the_logits_of_prefill(tmp_path, cache):
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 500,
        "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
        "hidden_act": "silu", "eos_token_id": 1,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    runner = build_runner(
        RunnerOptions(
            model_path=tmp_path, load_format="dummy", device="cuda", num_pages=128, max_running=64, kv_cache_dtype=cache
        )
    )
    table = np.arange(96, dtype=np.int32).reshape(3, 32)
    before = [part(0, list(range(2, 40)), 0, False), part(1, list(range(3, 103)), 0, False)]
    runner.execute(step_for(runner.info, 0, table, before))
    requests = [part(0, [7], 38), part(1, list(range(30, 42)), 100), part(2, list(range(5, 25)), 0, False)]
    step = step_for(runner.info, 1, table, requests)
    wanted = runner.logits(step)[[0, 12]]
    graphs = runner._graphs
    assert graphs is not None
    rows = decode_rows(step, PAGE, graphs.largest, graphs.most_pages)
    assert rows is not None
    with torch.inference_mode():
        result = graphs.run(rows)
        got = result.logits[torch.tensor(rows.last).cuda()].float()
    assert float((got - wanted).norm() / wanted.norm()) < 0.03
    tokens = runner.execute(step).token_ids
    assert tokens[2] == []
    for row, (token,) in enumerate(tokens[:2]):
        assert float(wanted[row].max() - wanted[row, token]) < 0.1 * float(wanted[row].std())
