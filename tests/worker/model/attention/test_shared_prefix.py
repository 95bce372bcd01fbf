"""What decodes share is found in their page tables and read once; the logits and the text are the same."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from sapwood_common.contract.sampling import SamplingParams
from sapwood_kernels.attention.latent.heads import LatentHeads
from sapwood_testing.worker.steps import Part, step_for
from sapwood_worker.model.attention import paged
from sapwood_worker.model.attention.paged import SharedPrefixes, find_runs
from sapwood_worker.model.attention.torch_native import TorchSharedAttention
from sapwood_worker.model.runner import memory
from sapwood_worker.model.runner.builder import build_runner
from sapwood_worker.model.runner.options import RunnerOptions

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GREEDY = SamplingParams(temperature=0.0)
SHARED = 40
"""Pages that the requests of a step here share."""


def found(table: list[list[int]], lengths: list[int]) -> list[tuple[list[int], int, int]]:
    runs = find_runs(np.array(table, np.int32), np.array(lengths), 16)
    if runs is None:
        return []
    where = zip(runs.first, runs.count, runs.begin, runs.end, strict=True)
    return [(sorted(runs.order[i : i + count].tolist()), int(begin), int(end)) for i, count, begin, end in where]


def rows(*prefixes: list[int]) -> list[list[int]]:
    """Page tables of 40 that begin so; all other pages are different ones."""
    return [[*prefix, *range(1000 * (i + 1), 1000 * (i + 1) + 40 - len(prefix))] for i, prefix in enumerate(prefixes)]


def test_requests_that_share_nothing_are_told_apart_by_their_first_page():
    assert found(rows([1], [2], [3]), [640] * 3) == []


def test_a_run_ends_where_the_first_differs():
    system = list(range(100, 120))
    assert found(rows([*system, 7], system, [5]), [640, 600, 640]) == [([0, 1], 0, 320)]


def test_runs_branch_at_each_level():
    system, first, second = list(range(100, 110)), list(range(200, 209)), list(range(300, 308))
    table = rows([*system, *first], [*system, *second], system, [*system, *first], [*system, *second], [1])
    assert sorted(found(table, [640] * 6)) == sorted(
        [([0, 1, 2, 3, 4], 0, 160), ([0, 3], 160, 304), ([1, 4], 160, 288)]
    )


def test_what_is_too_short_for_a_run_is_part_of_the_next():
    table = rows([100, 101, *range(200, 220)], [100, 101], [100, 101, *range(200, 220)])
    assert found(table, [640] * 3) == [([0, 2], 0, 352)]


def test_the_last_key_is_a_requests_own_and_nothing_beyond_its_pages_is_read():
    table = [list(range(40))] * 3  # the tokens of one prompt, as rows of a graph
    assert found(table, [321, 322, 640]) == [([0, 1, 2], 0, 320)]
    assert found(table, [320, 640, 640]) == [([0, 1, 2], 0, 304), ([1, 2], 304, 624)]
    assert found(table, [1, 640, 640]) == [([1, 2], 0, 624)]


def test_sharing_little_does_not_pay_and_is_not_counted():
    prefixes = SharedPrefixes(16)
    few = np.array(rows(*[list(range(500, 510))] * 3), np.int32)
    assert prefixes.find([few], np.array([640] * 3)) is None
    assert prefixes.take() == 0
    many = np.array(rows(*[list(range(500, 539))] * 16), np.int32)
    runs = prefixes.find([many, many], np.array([640] * 16))
    assert runs is not None and runs[0] is not None and runs[0].spared == 15 * 39 * 16
    assert (prefixes.take(), prefixes.take()) == (15 * 39 * 16, 0)


def test_what_was_found_holds_until_a_request_comes_or_goes():
    prefixes = SharedPrefixes(16)
    table = np.array(rows(*[list(range(500, 530))] * 20, [7], [8]), np.int32)
    lengths = np.full(22, 600)
    lengths[-1] = 20  # its pages beyond the second are undefined

    def found_now() -> object:
        runs = prefixes.find([table], lengths)
        assert runs is not None
        return runs[0]

    first = found_now()
    lengths += 1
    table[:, 38], table[-1, 5] = 4, 9
    assert found_now() is first
    table[20] = table[0]  # another request with the same prefix, in the place of one without
    second = found_now()
    assert second is not first and second.count.tolist() == [21]
    table[3, 2] = 1
    assert found_now().count.tolist() == [20]
    lengths[5] = 17  # a request of one page in the place of a longer one
    assert found_now().count.tolist() == [19]


def test_that_nothing_is_shared_is_found_once_too(monkeypatch):
    searches: list[int] = []
    monkeypatch.setattr(paged, "find_runs", lambda *args: searches.append(len(args[0])) or find_runs(*args))
    prefixes = SharedPrefixes(16)
    table = np.array(rows(*[[500, 501]] * 20), np.int32)  # a beginning too short to be read for itself
    lengths = np.full(20, 600)
    for _ in range(3):
        assert prefixes.find([table], lengths) is None
        lengths += 1
    assert len(searches) == 1
    lengths[7] = 40  # a shorter request in the place of another
    for _ in range(3):
        assert prefixes.find([table], lengths) is None
    lengths[7] = 600  # and a longer one again
    table[7] = table[6]
    assert prefixes.find([table], lengths) is None  # too few keys
    assert len(searches) == 3
    lengths[:] = 1  # rows that read by themselves
    assert prefixes.find([table], lengths) is None and find_runs(table, lengths, 16) is None


def decoded(make_runner, tiny, monkeypatch, *, mixed: bool = False, **options):
    """The logits of requests with a prefix in common, of which some share more, and how much was not read."""
    monkeypatch.setattr(paged, "LEAST_SPARED", 1)
    runner = make_runner(tiny.path, num_pages=128, page_size=4, max_running=8, **options)
    rng = np.random.default_rng(7)
    common = rng.integers(3, 50, SHARED * 4).tolist()
    more = rng.integers(3, 50, 34 * 4).tolist()
    prompts = [common + more, common, common + more, common + more[:6], rng.integers(3, 50, 30).tolist()]
    table = np.zeros((6, 80), np.int32)
    table[:4, :SHARED] = np.arange(SHARED)
    table[[0, 2], SHARED : SHARED + 34] = np.arange(SHARED, SHARED + 34)
    own = iter(range(SHARED + 34, 128))
    starts = [len(prompt) for prompt in prompts]
    table[3, SHARED : SHARED + 1] = next(own)
    for i, start in enumerate(starts):
        first = (start // 4) if i != 4 else 0
        for page in range(first, (start + 2) // 4 + 1):
            table[i, page] = next(own)
    table[5, :10] = [next(own) for _ in range(10)]
    tables = np.tile(table, (1, 1 + len(runner.info.windows)))
    for i in (0, 1, 3, 4):  # what they share is written once; each writes its own
        runner.execute(step_for(runner.info, i, tables, [Part(i, prompts[i], 0, 0, GREEDY)]))
    parts = [Part(i, [5 + i], start, 1, GREEDY) for i, start in enumerate(starts)]
    if mixed:
        parts.append(Part(5, rng.integers(3, 50, 20).tolist(), 0, 1, GREEDY))
    step = step_for(runner.info, 9, tables, parts)
    logits = runner.logits(step).cpu()
    return logits, runner.execute(step)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "deepseek-v3"])
def test_logits_and_tokens_are_the_same_with_sharing_and_without(name, mixed, tiny_model, make_runner, monkeypatch):
    tiny = tiny_model(name)
    wanted, plain = decoded(make_runner, tiny, monkeypatch, mixed=mixed, shared_prefix_attention=False)
    got, shared = decoded(make_runner, tiny, monkeypatch, mixed=mixed)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    assert shared.token_ids == plain.token_ids
    assert plain.spared_tokens == 0
    # Twice, for the logits too: 4 requests have 40 pages of 4 in common, 2 of them 34 more.
    assert shared.spared_tokens == 2 * (3 * SHARED * 4 + 34 * 4)


@pytest.mark.slow
def test_tritons_kernel_gives_the_same(tiny_model, make_runner, monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed")
    tiny = tiny_model("gemma3")
    wanted, plain = decoded(make_runner, tiny, monkeypatch, shared_prefix_attention=False)
    got, shared = decoded(
        make_runner, tiny, monkeypatch, attention_backend="prefill=torch,decode=triton", device=DEVICE, dtype="float32"
    )
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    assert shared.token_ids == plain.token_ids and shared.spared_tokens


@pytest.mark.slow
def test_decodes_of_latent_attention_share_in_tritons_kernels_too(tiny_model, make_runner, monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed")
    tiny = tiny_model("deepseek-v3")
    wanted, plain = decoded(make_runner, tiny, monkeypatch, shared_prefix_attention=False)
    got, shared = decoded(
        make_runner, tiny, monkeypatch, attention_backend="prefill=torch,decode=triton", device=DEVICE, dtype="float32"
    )
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    assert shared.token_ids == plain.token_ids and shared.spared_tokens


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("cache", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("group", [1, 4])
def test_on_a_gpu_sharing_gives_the_same_with_graphs_and_without(tmp_path, group, cache):
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 3, "num_attention_heads": 2 * group, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 500,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
        "hidden_act": "silu", "eos_token_id": 1,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    batch, common = 40, 90
    table = np.arange(batch * 100, dtype=np.int32).reshape(batch, 100) + common
    table[:, :common] = np.arange(common)
    prompt = np.random.default_rng(1).integers(3, 500, common * 16).tolist()
    parts = [Part(i, [7 + i], common * 16, 1, GREEDY) for i in range(batch)]
    later = [Part(i, [9 + i], common * 16 + 1, 1, GREEDY) for i in range(batch)]
    results = []
    for share in (False, True):
        runner = build_runner(
            RunnerOptions(
                tmp_path, load_format="dummy", device="cuda", num_pages=5000, max_running=64, kv_cache_dtype=cache,
                shared_prefix_attention=share,
            )
        )  # fmt: skip
        runner.execute(step_for(runner.info, 0, table, [Part(0, prompt, 0, 0, GREEDY)]))
        replayed = runner.execute(step_for(runner.info, 1, table, parts))
        assert bool(replayed.spared_tokens) is share
        logits = runner.logits(step_for(runner.info, 2, table, parts))
        tokens = runner.execute(step_for(runner.info, 3, table, later)).token_ids
        results.append((logits, runner.logits(step_for(runner.info, 3, table, later)), tokens))
    (wanted, wanted_last, _), (got, got_last, tokens) = results
    assert float((got - wanted).norm() / wanted.norm()) < 0.03
    assert float((got_last - wanted_last).norm() / wanted_last.norm()) < 0.03
    for row, (token,) in enumerate(tokens):  # by a graph
        assert float(wanted_last[row].max() - wanted_last[row, token]) < 0.1 * float(wanted_last[row].std())


@pytest.mark.parametrize("float8", [False, True])
def test_latent_keys_that_prompts_share_are_made_once(float8, tiny_model, make_runner, monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed")
    tiny, rng = tiny_model("deepseek-v3"), np.random.default_rng(3)
    expanded: list[int] = []
    expand = LatentHeads.expand
    monkeypatch.setattr(
        LatentHeads, "expand", lambda own, x, *more, **how: expanded.append(len(x)) or expand(own, x, *more, **how)
    )
    common, more = (rng.integers(3, 50, count).tolist() for count in (160, 40))
    prompts = [common + more, rng.integers(3, 50, 9).tolist(), common, common + more]
    table = np.zeros((4, 60), np.int32)
    table[:, :40] = np.arange(40)
    table[[0, 3], 40:50] = np.arange(40, 50)
    table[[0, 3], 50:60] = np.arange(60, 80).reshape(2, 10)
    table[2, 40:50], table[1, :10] = np.arange(80, 90), np.arange(90, 100)
    tails = rng.integers(3, 50, (4, 5)).tolist()
    answers = []
    for share in (False, True):
        runner = make_runner(
            tiny.path, num_pages=128, page_size=4, max_running=8, attention_backend="prefill=triton,decode=torch",
            shared_prefix_attention=share, kv_cache_dtype="fp8_e4m3" if float8 else "auto", dtype="float32", device=DEVICE,
        )  # fmt: skip
        runner.execute(step_for(runner.info, 0, table, [Part(0, prompts[0], 0, 0, GREEDY)]))
        expanded.clear()
        parts = [
            Part(i, prompt + tail if i == 1 else tail, 0 if i == 1 else len(prompt), 1, GREEDY)
            for i, (prompt, tail) in enumerate(zip(prompts, tails, strict=True))
        ]
        step = step_for(runner.info, 1, table, parts)
        answers.append((runner.logits(step).cpu(), sum(expanded), runner.execute(step)))
    (wanted, all_keys, plain), (got, made, shared) = answers
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    assert shared.token_ids == plain.token_ids
    assert plain.spared_tokens == 0 and shared.spared_tokens == 2 * (160 + 200)  # twice, for the logits too
    layers = json.loads((tiny.path / "config.json").read_text())["num_hidden_layers"]
    assert all_keys - made == layers * (160 + 200)


def test_prompts_share_where_it_spares_tiles():
    table = np.array(rows(*[list(range(500, 539))] * 16), np.int32)
    starts = np.full(16, 39 * 16 + 5)
    prefixes = SharedPrefixes(16)
    assert prefixes.find_prompts([table], starts, np.full(16, 128), tile=128) is None  # as many tiles as before
    assert prefixes.find_prompts([table], np.zeros(16, np.int64), np.full(16, 8), tile=128) is None
    assert prefixes.take() == 0
    found = prefixes.find_prompts([table], starts, np.full(16, 8), tile=128)
    assert found is not None and found[0] is not None
    assert prefixes.take() == found[0].spared == 15 * 39 * 16


def prompted(make_runner, tiny, monkeypatch, **options):
    """The logits of prompts, some of which begin alike, with two decodes, and what the step says."""
    monkeypatch.setattr(paged, "LEAST_SPARED", 1)
    runner = make_runner(tiny.path, num_pages=160, page_size=4, max_running=8, **options)
    rng = np.random.default_rng(7)
    common, more = rng.integers(3, 50, SHARED * 4).tolist(), rng.integers(3, 50, 34 * 4).tolist()
    begun = [rng.integers(3, 50, 5).tolist(), common, common + more, common, common + more, []]
    table = np.zeros((6, 90), np.int32)
    table[1:5, :SHARED] = np.arange(SHARED)
    table[[2, 4], SHARED : SHARED + 34] = np.arange(SHARED, SHARED + 34)
    own = iter(range(SHARED + 34, 160))
    for i, tokens in enumerate(begun):
        for page in range(len(tokens) // 4, len(tokens) // 4 + 8):
            table[i, page] = next(own)
    tables = np.tile(table, (1, 1 + len(runner.info.windows)))
    for i in (0, 1, 2):  # what they share is written once
        runner.execute(step_for(runner.info, i, tables, [Part(i, begun[i], 0, 0, GREEDY)]))
    new = [1, 5, 9, 1, 14, 20]
    parts = [
        Part(i, rng.integers(3, 50, count).tolist(), len(tokens), 1, GREEDY)
        for i, (tokens, count) in enumerate(zip(begun, new, strict=True))
    ]
    step = step_for(runner.info, 9, tables, [parts[0], parts[3], parts[1], parts[2], parts[4], parts[5]])
    logits = runner.logits(step).cpu()
    return logits, runner.execute(step)


@pytest.mark.parametrize("backend", ["auto", "prefill=torch,decode=torch"])
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_prompts_that_begin_alike_give_the_same_with_sharing_and_without(
    name, backend, tiny_model, make_runner, monkeypatch
):
    check_prompts(tiny_model(name), make_runner, monkeypatch, attention_backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_tritons_kernels_give_the_same_for_prompts(name, tiny_model, make_runner, monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed")
    options = {"attention_backend": "prefill=triton,decode=torch", "device": DEVICE, "dtype": "float32"}
    check_prompts(tiny_model(name), make_runner, monkeypatch, **options)


def check_prompts(tiny, make_runner, monkeypatch, **options) -> None:
    wanted, plain = prompted(make_runner, tiny, monkeypatch, **options, shared_prefix_attention=False)
    got, shared = prompted(make_runner, tiny, monkeypatch, **options)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    assert shared.token_ids == plain.token_ids
    assert plain.spared_tokens == 0 and shared.spared_tokens >= 2 * (SHARED * 4 + 34 * 4)  # twice, for the logits too


def test_a_trial_of_prompts_that_share_compiles_what_they_need(tiny_model, make_runner, monkeypatch):
    planned: list[int] = []
    plan = TorchSharedAttention.plan
    monkeypatch.setattr(
        TorchSharedAttention, "plan", lambda own, batch: planned.append(len(batch.runs.first)) or plan(own, batch)
    )
    for module in (paged, memory):
        monkeypatch.setattr(module, "LEAST_SPARED", 160)
    runner = make_runner(tiny_model("qwen3").path, num_pages=64, page_size=4, max_running=2)
    parts = runner._model, runner._pool, runner._backend, runner.ops
    memory.compute_shared_trial(160, *parts)  # no room for what follows on the 160
    assert planned == []
    memory.compute_shared_trial(200, *parts)
    assert planned == [1] and runner._backend.take_spared() == 0
