"""Steps of prompts as CUDA graphs: which sizes there are; on a GPU, that they compute what single launches compute."""

import itertools
import json

import numpy as np
import pytest
import torch

from sapwood_common.contract.sampling import SamplingParams
from sapwood_testing.worker.steps import Part, step_for
from sapwood_worker.model.runner.builder import build_runner
from sapwood_worker.model.runner.graphs.piecewise_graphs import token_ladder, worth_capturing
from sapwood_worker.model.runner.options import RunnerOptions

GREEDY = SamplingParams(temperature=0.0)
TINY = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 500,
    "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "hidden_act": "silu", "eos_token_id": 1,
}  # fmt: skip


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_replayed_step_equals_one_launched_kernel_by_kernel(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    runner = build_runner(
        RunnerOptions(model_path=tmp_path, load_format="dummy", device="cuda", num_pages=64, max_running=4)
    )
    table = np.arange(64, dtype=np.int32).reshape(2, 32)
    runner.execute(step_for(runner.info, 0, table, [Part(0, list(range(2, 40)), 0, False, GREEDY)]))
    step = step_for(
        runner.info,
        1,
        table,
        [
            Part(0, [7], 38, True, GREEDY),
            Part(1, list(range(3, 90)), 0, True, GREEDY),
        ],
    )
    replayed = runner.logits(step)
    pieces, runner._pieces = runner._pieces, None
    assert pieces is not None
    single = runner.logits(step)
    assert float((replayed - single).norm() / single.norm()) < 0.02


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graphs_are_captured_up_to_the_set_batch_and_choose_as_single_launches(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    made = {"model_path": tmp_path, "load_format": "dummy", "device": "cuda", "num_pages": 64, "max_running": 4}
    table = np.arange(64, dtype=np.int32).reshape(4, 16)
    prompts = [Part(i, list(range(2 + i, 40)), 0, True, GREEDY) for i in range(4)]
    decodes = [Part(i, [7], 38 - i, True, GREEDY) for i in range(4)]
    wanted: list[torch.Tensor] = []
    for largest, options in ((None, {"cuda_graphs": False}), (4, {}), (2, {"cuda_graph_max_batch": 2})):
        runner = build_runner(RunnerOptions(**made, **options))
        assert (runner._graphs and runner._graphs.largest, runner._pieces is None) == (largest, largest is None)
        for number, parts in enumerate((prompts, decodes)):
            step = step_for(runner.info, number, table, parts)
            tokens = [token for (token,) in runner.execute(step).token_ids]
            if largest is None:
                wanted.append(runner.logits(step)[np.cumsum(step.counts) - 1])
            # Products of other sizes round otherwise: of two tokens that are as likely, either may come.
            chosen = wanted[number][range(4), tokens]
            assert bool((wanted[number].amax(1) - chosen < 0.1 * wanted[number].std(1)).all())


def test_the_ladder_pads_by_less_than_a_quarter():
    for largest in (16, 100, 512, 4096, 8192):
        sizes = token_ladder(largest)
        assert sizes[-1] == largest
        assert sizes == sorted(set(sizes))
        assert all(later - earlier <= min(max(16, earlier / 4), 512) for earlier, later in itertools.pairwise(sizes))


def test_a_large_model_is_captured_up_to_fewer_tokens_than_a_small_one():
    assert worth_capturing(440_000_000, 28) == 8192
    assert worth_capturing(7_000_000_000, 32) == 512
    assert worth_capturing(70_000_000_000, 80) == 256
    assert worth_capturing(17_500_000_000, 80) == 512  # over four ranks


def test_float8_takes_the_device_less_time_and_the_host_more_so_more_is_captured():
    assert worth_capturing(7_000_000_000, 32, float8=True) == 1792
