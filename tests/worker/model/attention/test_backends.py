"""Attention backends: chosen by name or by what can serve, refused by name, brought by packages; all give the same logits."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.errors import ConfigError
from sapwood_kernels.attention.planned import AttentionShape, Variant
from sapwood_kernels.native.products import load_library
from sapwood_kernels.ops.device import DeviceOps
from sapwood_kernels.ops.factory import device_ops
from sapwood_testing.worker.steps import Part, step_for
from sapwood_worker.model.attention import latent_prefill
from sapwood_worker.model.attention.backend import Abilities, AttentionBackend, AttentionNeeds
from sapwood_worker.model.attention.registry import choose_backend
from sapwood_worker.model.runner.builder import build_runner
from sapwood_worker.model.runner.options import RunnerOptions

CPU = device_ops("cpu")
GREEDY = SamplingParams(temperature=0.0)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def needs(
    dtype=torch.float32, head_dim=16, window=None, softcap=None, cache=None, sinks=False, chunked=False
) -> AttentionNeeds:
    shape = AttentionShape(4, 2, head_dim, 16, dtype)
    return AttentionNeeds(shape, cache or dtype, (Variant(1.0, window, softcap, sinks, chunked),), 100)


def test_an_unknown_name_is_refused_with_those_that_are_known():
    with pytest.raises(
        ConfigError, match="--attention-backend fa9: 'fa9' is none of fixed_order, flashinfer, native, torch, triton"
    ):
        choose_backend("fa9", "decode", needs(), CPU)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (needs(torch.float32), "takes bfloat16, not float32"),
        (needs(torch.bfloat16, cache=torch.float8_e5m2), "reads no cache of float8_e5m2"),
        (needs(torch.bfloat16, head_dim=80), "takes heads of 64, 128 elements, not 80"),
        (needs(torch.bfloat16, head_dim=64, window=5), "has no sliding windows"),
        (needs(torch.bfloat16, head_dim=64, softcap=5.0), "does not cap scores"),
        (needs(torch.bfloat16, head_dim=64, sinks=True), "has no attention sinks"),
        (needs(torch.bfloat16, head_dim=64, window=5, chunked=True), "has no chunks"),
    ],
)
def test_what_a_backend_cannot_do_is_said(asked: AttentionNeeds, reason: str):
    few = Abilities(
        dtypes=frozenset({torch.bfloat16}), head_dims=frozenset({64, 128}), windows=False, softcap=False
    )  # fmt: skip
    if asked.kinds[0].chunked:
        few = replace(few, windows=True)
    refusal = few.refusal(asked, CPU)
    assert refusal is not None and reason in refusal
    assert few.refusal(needs(torch.bfloat16, head_dim=64), CPU) is None


def test_auto_takes_the_first_that_can_and_says_why(monkeypatch):
    gpu = DeviceOps(torch.device("cuda"))
    capability = (9, 0)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    monkeypatch.setattr("sapwood_worker.model.attention.flashinfer.find_spec", lambda name: object())
    for half, name in (("prefill", "flashinfer"), ("decode", "triton")):
        chosen = choose_backend("auto", half, needs(torch.bfloat16, head_dim=128), gpu)
        assert (chosen.name, chosen.reason) == (name, "the fastest on cuda")
    chosen = choose_backend("auto", "prefill", needs(torch.bfloat16, head_dim=80), gpu)
    assert chosen.name == "triton"
    assert chosen.reason == "not flashinfer: it takes heads of 64, 128, 256 elements, not 80"
    chosen = choose_backend("auto", "prefill", needs(torch.bfloat16, head_dim=64, sinks=True), gpu)
    assert (chosen.name, chosen.reason) == ("triton", "not flashinfer: it has no attention sinks")
    chosen = choose_backend("auto", "prefill", needs(torch.bfloat16, head_dim=64, window=5, chunked=True), gpu)
    assert (chosen.name, chosen.reason) == ("triton", "not flashinfer: it has no chunks (attention that begins again)")
    latent = replace(needs(torch.bfloat16, head_dim=128), latent=True)
    refused = "not flashinfer: it has no prefill of latent attention (MLA)"
    assert choose_backend("auto", "prefill", latent, gpu).reason == refused
    assert choose_backend("auto", "decode", latent, gpu).name == "triton"
    assert choose_backend("auto", "prefill", latent, gpu).name == "triton"
    capability = (7, 5)
    chosen = choose_backend("auto", "decode", needs(torch.float16, head_dim=128), gpu)
    assert chosen.name == "torch"
    assert "not triton: it needs compute capability 8.0, and this GPU has 7.5" in chosen.reason
    assert choose_backend("auto", "prefill", needs(), gpu).reason == "float32 on cuda"
    assert choose_backend("auto", "prefill", needs(torch.bfloat16), CPU).reason == "bfloat16 on cpu"


def test_a_backend_that_needs_a_gpu_is_refused_without_one():
    with pytest.raises(
        ConfigError, match=r"flashinfer cannot compute the prefill of this model here: .*(GPU|installed)"
    ):
        choose_backend("flashinfer", "prefill", needs(torch.bfloat16), CPU)
    elsewhere = AttentionBackend(Abilities(frozenset({torch.float32}), device=lambda ops: f"not on {ops.device.type}"))
    assert elsewhere.abilities.refusal(needs(), DeviceOps(torch.device("meta"))) == "not on meta"


def served(make_runner, make_driver, tiny, **options):
    """The logits in float32 of a prompt after a cached prefix, with two decodes."""
    driver = make_driver(make_runner(tiny.path, **options))
    for slot, count in ((0, 9), (1, 20), (2, 30)):
        driver.add(slot, [(7 * i + slot) % 50 + 3 for i in range(count)])
    driver.runner.execute(driver.output({0: 8, 1: 19, 2: 18}))
    return driver.runner.logits(driver.output({0: 1, 1: 1, 2: 12})).cpu(), driver.runner.info


@pytest.mark.parametrize("setting", ["triton", "prefill=torch,decode=triton"])
def test_triton_gives_the_logits_of_torch(setting, tiny_model, make_runner, make_driver):
    pytest.importorskip("triton", reason="Triton is not installed")
    tiny = tiny_model("gemma3")
    wanted, info = served(make_runner, make_driver, tiny, attention_backend="torch")
    # On the GPU where there is one, else in Triton's interpreter.
    got, info = served(make_runner, make_driver, tiny, attention_backend=setting, device=DEVICE, dtype="float32")
    assert {info.prefill_attention, info.decode_attention} <= {"torch", "triton"}
    assert info.attention_reason == "as told"
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "gpt-oss", "llama4"])  # capped scores, windows, sinks, chunks
def test_on_a_cpu_decodes_compiled_from_c_give_the_logits_of_torch(family, tiny_model, make_runner, make_driver):
    if load_library() is None:
        pytest.skip("nothing is compiled: python hatch_build.py")
    tiny = tiny_model(family)
    got, info = served(make_runner, make_driver, tiny)
    assert (info.prefill_attention, info.decode_attention) == ("torch", "native")
    assert info.attention_reason == "float32 on cpu"
    wanted, _ = served(make_runner, make_driver, tiny, attention_backend="torch")
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("cache", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize(
    "setting", ["flashinfer", "triton", "prefill=flashinfer,decode=triton", "prefill=triton,decode=torch"]
)
def test_on_a_gpu_every_backend_gives_the_logits_of_torch_with_graphs_and_without(tmp_path, setting, cache):
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 500,
        "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
        "hidden_act": "silu", "eos_token_id": 1,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = {"model_path": tmp_path, "load_format": "dummy", "device": "cuda", "num_pages": 128, "max_running": 8}
    table = np.arange(96, dtype=np.int32).reshape(3, 32)
    prompts = [Part(0, list(range(2, 40)), 0, 0, GREEDY), Part(1, list(range(3, 103)), 0, 0, GREEDY)]
    mixed = [Part(0, [7], 38, 1, GREEDY), Part(1, [9], 100, 1, GREEDY), Part(2, list(range(5, 305)), 0, 1, GREEDY)]
    decodes = [Part(0, [8], 39, 1, GREEDY), Part(1, [11], 101, 1, GREEDY), Part(2, [6], 300, 1, GREEDY)]
    results = []
    for options in ({"attention_backend": "torch"}, {"attention_backend": setting}):
        runner = build_runner(RunnerOptions(**made, kv_cache_dtype=cache, **options))
        runner.execute(step_for(runner.info, 0, table, prompts))
        logits = runner.logits(step_for(runner.info, 1, table, mixed))
        tokens = runner.execute(step_for(runner.info, 2, table, decodes)).token_ids
        results.append((logits, runner.logits(step_for(runner.info, 2, table, decodes)), tokens))
    (wanted, wanted_last, _), (got, got_last, tokens) = results
    assert float((got - wanted).norm() / wanted.norm()) < 0.03
    assert float((got_last - wanted_last).norm() / wanted_last.norm()) < 0.03
    for row, (token,) in enumerate(tokens):  # by a graph, unless torch decodes
        assert float(wanted_last[row].max() - wanted_last[row, token]) < 0.1 * float(wanted_last[row].std())


def test_a_package_can_bring_an_attention_backend(plugin, tiny_model, make_runner, make_driver):
    pytest.importorskip("transformers", reason="transformers is not installed")
    tiny = tiny_model("qwen3-window")
    wanted, _ = served(make_runner, make_driver, tiny)
    plugin(
        "sapwood.attention_backends",
        "plain",
        """
        import torch

        from sapwood_kernels import reference
        from sapwood_worker.model.attention.backend import Abilities, AttentionBackend

        class Plain:
            def __init__(self, parts):
                self.pool = parts.pool

            def plan(self, batch):
                self.batch = batch

            def attend(self, layer, query, out=None):
                batch, pages = self.batch, torch.from_numpy(self.batch.page_table)
                slots = torch.arange(self.pool.num_pages * self.pool.page_size)
                keys, values = self.pool.read(layer.index, slots, query.dtype)
                result = reference.paged_attention(
                    query, keys, values, pages, torch.from_numpy(batch.query_starts).diff(), torch.from_numpy(batch.seq_lens),
                    self.pool.page_size, scale=layer.scale, window=layer.window, softcap=layer.softcap,
                )
                return result if out is None else out.copy_(result)

        BACKEND = AttentionBackend(Abilities(frozenset({torch.float32})), prefill=Plain, reads_keys=False)
        """,
        "BACKEND",
    )
    got, info = served(make_runner, make_driver, tiny, attention_backend="prefill=plain")
    assert (info.prefill_attention, info.decode_attention) in {("plain", "native"), ("plain", "torch")}
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(ConfigError, match="plain cannot compute the decode of this model here: it has no decode"):
        make_runner(tiny.path, attention_backend="plain")
    with pytest.raises(ConfigError, match="it takes float32, not bfloat16"):
        make_runner(tiny.path, attention_backend="prefill=plain", dtype="bfloat16")


def test_triton_computes_latent_attention_as_torch_does(tiny_model, make_runner, make_driver):
    pytest.importorskip("triton", reason="Triton is not installed")
    tiny = tiny_model("deepseek-v3")
    wanted, _ = served(make_runner, make_driver, tiny)
    got, info = served(make_runner, make_driver, tiny, attention_backend="triton", device=DEVICE, dtype="float32")
    assert (info.prefill_attention, info.decode_attention) == ("triton", "triton")
    assert float((got - wanted).abs().max()) <= 1e-4 * float(wanted.abs().max())


def each_by_itself(query, key, value, at, scale):
    """What ``ragged.ragged_attention`` gives, of any device, dtype and size of heads."""
    starts, ends = at.queries.tolist(), at.keys.tolist()
    assert at.most_queries == max(np.diff(starts)) and at.most_keys == max(np.diff(ends))
    assert (len(query), len(key)) == (starts[-1], ends[-1])
    out = torch.empty_like(query)
    for i in range(len(starts) - 1):
        own, seen = slice(*starts[i : i + 2]), slice(*ends[i : i + 2])
        mask = torch.ones(own.stop - own.start, seen.stop - seen.start, dtype=torch.bool, device=query.device)
        mask = mask.tril(mask.shape[1] - mask.shape[0])
        parts = (each.transpose(0, 1) for each in (query[own], key[seen], value[seen]))
        out[own] = F.scaled_dot_product_attention(*parts, attn_mask=mask, scale=scale).transpose(0, 1)
    return out


@pytest.mark.parametrize("launched", [False, True], ids=["one by one", "together"])
@pytest.mark.parametrize(("gathered", "expanded"), [(1 << 14, 1 << 27), (70, 2000)])
def test_chunks_of_latent_prompts_by_flash_attention_equal_transformers(
    gathered, expanded, launched, tiny_model, make_runner, make_driver, monkeypatch
):
    """Keys of all of them are made at once, for all heads; or of two at most, for some heads at a time. So they are attended to
    one by one, or as on a GPU by a launch for all of which keys are made at once."""
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setattr(latent_prefill, "_GATHERED", gathered)
    monkeypatch.setattr(latent_prefill, "_EXPANDED", expanded)
    launches = []
    if launched:
        monkeypatch.setattr(latent_prefill, "serves", lambda query: True)
        monkeypatch.setattr(
            latent_prefill, "ragged_attention", lambda *each: launches.append(each[3]) or each_by_itself(*each)
        )
        monkeypatch.setattr(latent_prefill, "LEAST_PLANNED", 50)  # of which the chunk sees more, but computes fewer
    tiny = tiny_model("deepseek-v2")
    driver = make_driver(
        make_runner(tiny.path, attention_backend="prefill=triton,decode=torch", device=DEVICE, dtype="float32")
    )
    launches.clear()  # of the start's own trials on a GPU
    tokens = [3 + i * 11 % 90 for i in range(60)]
    wanted = tiny.logits(tokens)
    driver.add(2, tokens)
    driver.add(3, tokens[:40])
    driver.add(4, tokens[:9])
    # A prompt whole, then a chunk over a cached prefix with other prompts.
    steps = {2: 30}, {2: 30, 3: 40, 4: 9}
    got = torch.cat([driver.runner.logits(driver.output(each)) for each in steps]).cpu()
    expected = torch.cat((wanted, wanted[:40], wanted[:9]))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4 * float(wanted.abs().max()))
    sizes = {len(each.queries) - 1 for each in launches}
    assert sizes == (({3} if gathered > 70 else {2}) if launched else set())
