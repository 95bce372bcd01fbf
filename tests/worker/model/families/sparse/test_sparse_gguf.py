"""GGUF files of families with experts give transformers' logits with the numbers that are stored."""

from __future__ import annotations

import inspect
import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gguf
import pytest
import torch
from safetensors.torch import load_file

from sapwood_common.errors import ConfigError
from sapwood_common.models.gguf_file import GgufFile, GgufTensor
from sapwood_kernels.native.products import load_library
from sapwood_kernels.ops.cpu import CpuOps
from sapwood_kernels.ops.factory import device_ops
from sapwood_testing.models.gguf_sparse import LAYOUTS, write_sparse_gguf
from sapwood_testing.models.same_logits import tokens_of
from sapwood_testing.worker.split_models import logits_of
from sapwood_testing.worker.thread_ranks import run_ranks
from sapwood_worker.model import loader
from sapwood_worker.model.checkpoint.gguf_source import expert_of, made_tensors
from sapwood_worker.model.distributed.group import Group
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.families.values import GgufValues
from sapwood_worker.model.loader import load_model
from sapwood_worker.model.runner.identity import sampled_fingerprint

TOKENS = tokens_of(41)
compiled = pytest.mark.skipif(load_library() is None, reason="the kernel is not compiled: python hatch_build.py")


def load(path, **options):
    return load_model(path, "auto", torch.float32, device_ops("cpu"), context_length=None, threads=2, seed=0, **options)


def assert_near(ours, oracle, near=2e-5):
    with torch.inference_mode():
        theirs = oracle(torch.tensor([TOKENS])).logits[0]
    assert (ours - theirs).abs().max() <= near * theirs.abs().max()


ONE_GROUP = {"n_group": 1, "topk_group": 1}
# With what files do not say as they mean it: windows of Mixtral and Qwen2, which no published model has, OLMoE's
# weights that are not normalised, one group, gpt-oss's limit, and cosines that yarn leaves as they are.
FAMILIES = {
    "mixtral": {"sliding_window": None},
    "qwen2-moe": {"use_sliding_window": False},
    "qwen3-moe": {},
    "olmoe": {"norm_topk_prob": False},
    "dots1-no-windows": ONE_GROUP,
    "glm4-moe": ONE_GROUP,
    "gpt-oss": {"swiglu_limit": 7.0},
    "deepseek-v2": {},
    "deepseek-v3": {},
    "glm4-moe-lite": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_transformers(tiny_model, tmp_path, name):
    changes = dict(FAMILIES[name])
    if name == "deepseek-v2":
        rope = tiny_model(name).oracle.config.rope_parameters
        changes["rope_parameters"] = {**rope, "mscale": rope["mscale_all_dim"]}
    path, oracle = write_sparse_gguf(tmp_path, tiny_model(name, **changes), name)
    assert_near(logits_of(load(path), TOKENS), oracle)


class SplitExperts(GgufFile):
    """A file whose experts have a tensor each, as Mixtral's of before April 2024 have."""

    def __init__(self, path):
        super().__init__(path)
        for name in [each for each in self.tensors if "_exps." in each]:
            whole = self.tensors.pop(name)
            for expert in range(whole.shape[0]):
                own = name.replace("_exps.weight", f".{expert}.weight")
                self.tensors[own] = replace(expert_of(self, whole, expert), name=own)


def test_a_mixtral_with_a_tensor_for_each_expert_equals_transformers(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "GgufFile", SplitExperts)
    path, oracle = write_sparse_gguf(tmp_path, tiny_model("mixtral", **FAMILIES["mixtral"]), "mixtral")
    assert_near(logits_of(load(path), TOKENS), oracle)


@pytest.mark.parametrize(("name", "experts", "groups"), [("deepseek-v3", 256, (8, 4)), ("deepseek-v2", 160, (8, 3))])
def test_older_files_of_deepseek_have_whole_matrices_and_name_no_groups(tiny_model, tmp_path, name, experts, groups):
    changes = {"n_routed_experts": experts, "n_group": groups[0], "topk_group": groups[1], "moe_intermediate_size": 8}
    tiny = tiny_model(name, **changes, num_hidden_layers=2, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    path, oracle = write_sparse_gguf(tmp_path, tiny, name, halves=False, says_groups=False)
    assert_near(logits_of(load(path), TOKENS), oracle)


@pytest.mark.parametrize("said", [{}, {"expert_group_count": 0, "expert_group_used_count": 0}])
def test_no_groups_are_one(said):
    metadata = {"block_count": 1, "feed_forward_length": 8, "expert_count": 12, "expert_used_count": 3, **said}
    file = SimpleNamespace(metadata={f"x.{key}": value for key, value in metadata.items()}, tensors={})
    routing = GgufValues(file, "x", {}).experts(renormalise=False).routing
    assert (routing.groups, routing.chosen_groups) == (1, 1)


@pytest.mark.parametrize(
    ("shapes", "fit"),
    [
        ({"attn_k_b.weight": (2, 32, 8), "attn_v_b.weight": (2, 6, 32)}, True),
        ({"attn_k_b.weight": (64, 8), "attn_v_b.weight": (12, 32)}, False),  # as some forks of llama.cpp write them
        ({"attn_k_b.weight": (2, 32, 8), "attn_v_b.weight": (2, 6, 16)}, False),
        ({"ffn_gate_exps.weight": (3, 8, 32), "ffn_up_exps.weight": (3, 8, 32)}, True),
        ({"ffn_gate_exps.weight": (3, 8, 32), "ffn_up_exps.weight": (3, 4, 32)}, False),
        ({"ffn_gate_exps.bias": (3, 8, 1), "ffn_up_exps.bias": (3, 8, 1)}, False),
        ({"ffn_down_exps.weight": (8, 32)}, False),
    ],
)
def test_tensors_that_do_not_fit_together_are_named(shapes, fit):
    tensors = {f"blk.0.{name}": GgufTensor(f"blk.0.{name}", shape, 0, 0) for name, shape in shapes.items()}
    file = SimpleNamespace(tensors=tensors, paths=[Path("x.gguf")])
    config = SimpleNamespace(num_layers=1, latent=True, sparse=SimpleNamespace(joined=True))
    if fit:
        assert [made.parts for _, made in made_tensors(file, config)] == [list(tensors.values())]
        return
    with pytest.raises(
        ConfigError,
        match=r"x\.gguf: .*fit together: "
        + re.escape(", ".join(f"{name} {list(each.shape)}" for name, each in tensors.items())),
    ):
        list(made_tensors(file, config))


SIZES = {"hidden_size": 64, "moe_intermediate_size": 96, "num_hidden_layers": 2}
KINDS = {
    "ffn_gate_exps": "Q4_0", "ffn_up_exps": "Q5_0", "ffn_down_exps": "Q8_0", "attn_q": "Q4_1", "attn_k": "Q8_0",
    "ffn_gate_shexp": "Q5_1", "ffn_down_shexp": "Q8_0", "token_embd": "Q8_0",
}  # fmt: skip
WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
QUANTISED = {
    "qwen3-moe": SIZES,
    "mixtral": {**FAMILIES["mixtral"], **WIDE, "num_local_experts": 6},
    "glm4-moe": {**SIZES, "num_hidden_layers": 3, **ONE_GROUP},
}


@pytest.fixture(scope="module")
def quantised(tiny_model, tmp_path_factory):
    """Makes a file with experts in few bits, once; returns it with transformers' model of its numbers."""
    made = {}

    def make(name, **kinds):
        key = name, *kinds.items()
        if key not in made:
            folder = tmp_path_factory.mktemp(name)
            made[key] = write_sparse_gguf(folder, tiny_model(name, **QUANTISED[name]), name, KINDS | kinds)
        return made[key]

    return make


def experts_of(loaded):
    """The bytes of all experts."""
    layers = [layer.mlp.experts for layer in loaded.model.layers if hasattr(layer.mlp, "experts")]
    sums = [inspect.getclosurevars(each._sum._sum).nonlocals for each in layers]
    methods = [product.__self__ for each in sums for part in ("gate_up", "down") for product in each[part].products]
    return {name: slot.target for method in methods for name, slot in method.slots().items()}


MXFP4 = {f"ffn_{kind}_exps": "MXFP4" for kind in ("gate", "up", "down")}


@compiled
@pytest.mark.parametrize(("name", "kinds"), [*((name, {}) for name in QUANTISED), ("qwen3-moe", MXFP4)])
def test_experts_are_multiplied_as_they_lie_in_the_file(quantised, name, kinds):
    path, oracle = quantised(name, **kinds)
    loaded = load(path)
    assert loaded.quantization == "gguf as stored"
    held = experts_of(loaded)
    assert len(held) > 10 and all(each.dtype == torch.uint8 for each in held.values())
    spans = re.findall(rf"([0-9a-f]+)-([0-9a-f]+) .*{path}", Path("/proc/self/maps").read_text())
    for each in held.values():
        assert any(int(low, 16) <= each.data_ptr() < int(high, 16) for low, high in spans), "not copied"
    assert_near(logits_of(loaded, TOKENS), oracle)


def test_a_model_may_be_in_several_files(tiny_model, tmp_path):
    path, oracle = write_sparse_gguf(tmp_path, tiny_model("qwen3-moe", **SIZES), "qwen3-moe", KINDS, tensors_each=7)
    files = sorted(tmp_path.glob("*.gguf"))
    assert len(files) > 3 and path == files[0]
    assert_near(logits_of(load(path), TOKENS), oracle)
    prints = {sampled_fingerprint(path)}
    with files[-1].open("r+b") as last:
        last.seek(-4, 2)
        last.write(b"else")
    prints.add(sampled_fingerprint(path))
    assert len(prints) == 2, "cached keys are of the whole model"
    with pytest.raises(ConfigError, match=rf"{files[1].name}: is one of {len(files)} files .* named: {path.name}"):
        load(files[1])
    files[2].unlink()
    with pytest.raises(ConfigError, match=rf"{files[2].name}: cannot be read"):
        load(path)


@pytest.mark.parametrize("name", QUANTISED)
def test_experts_of_a_file_may_be_widened(quantised, name):
    path, oracle = quantised(name)
    loaded = load(path, stored_weights="widen")
    assert loaded.quantization == "none"
    assert_near(logits_of(loaded, TOKENS), oracle)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("stored_weights", ["keep", "widen"])
def test_ranks_have_their_part(quantised, stored_weights, whole):
    # 64 of 128 inputs of the second matrix: with blocks of 32 numbers each rank has whole ones.
    path, oracle = quantised("mixtral")

    def work(group):
        parallel = Parallel(tp=group, ep=group if whole else Group())
        return logits_of(load(path, stored_weights=stored_weights, parallel=parallel), TOKENS, parallel)

    for logits in run_ranks(2, work):
        assert_near(logits, oracle)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_0", "Q4_1", "Q5_1", "MXFP4"])
def test_a_gpu_has_one_tensor_of_them(quantised, monkeypatch, kind):
    path, oracle = quantised("qwen3-moe", ffn_gate_exps=kind, ffn_up_exps=kind, ffn_down_exps=kind)
    monkeypatch.setattr(CpuOps, "multiplies_groups", True)
    monkeypatch.setattr(CpuOps, "groups_experts", True)  # multiplied by the reference of its kernels
    loaded = load(path)
    stacks = [layer.mlp.experts._sum._tensors for layer in loaded.model.layers if hasattr(layer.mlp, "experts")]
    assert stacks and all(tensors[0].dtype == torch.uint8 for tensors in stacks)
    assert_near(logits_of(loaded, TOKENS), oracle)


def test_a_gpu_may_widen_one_matrix_of_an_expert_and_keep_the_other(quantised, monkeypatch):
    path, oracle = quantised("qwen3-moe", ffn_gate_exps="Q4_1", ffn_up_exps="Q5_1", ffn_down_exps="Q8_0")
    monkeypatch.setattr(CpuOps, "multiplies_groups", True)
    monkeypatch.setattr(CpuOps, "groups_experts", True)
    loaded = load(path)
    held = [layer.mlp.experts._sum._tensors for layer in loaded.model.layers if hasattr(layer.mlp, "experts")]
    assert held and all(tensors[0].dtype == torch.float32 for tensors in held)
    assert all(any(each.dtype == torch.uint8 for each in tensors) for tensors in held)
    assert_near(logits_of(loaded, TOKENS), oracle)


@pytest.mark.parametrize(("kinds", "format_"), [(MXFP4, "fp4 as stored"), ({"ffn_gate_exps": "Q8_0"}, "none")])
def test_gpt_oss_files_are_read(tiny_model, tmp_path, kinds, format_):
    tiny = tiny_model("gpt-oss", hidden_size=64, intermediate_size=128, swiglu_limit=7.0)
    path, oracle = write_sparse_gguf(tmp_path, tiny, "gpt-oss", kinds)
    loaded = load(path)
    assert loaded.quantization == format_
    assert_near(logits_of(loaded, TOKENS), oracle)

    def work(group):
        parallel = Parallel(tp=group)
        return logits_of(load(path, parallel=parallel), TOKENS, parallel)

    for logits in run_ranks(2, work):
        assert_near(logits, oracle)


@pytest.mark.parametrize(("name", "changes"), [("qwen3-moe", {"decoder_sparse_step": 1}), ("qwen2-moe", {})])
def test_transformers_reads_the_same_numbers(tiny_model, tmp_path, name, changes):
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    tiny = tiny_model(name, **changes)
    path, oracle = write_sparse_gguf(tmp_path, tiny, name)
    found = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=tiny.oracle)
    theirs, expected = found["tensors"], oracle.state_dict()
    assert theirs.keys() == expected.keys()
    assert all(torch.equal(theirs[each], expected[each]) for each in expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_llama_cpp_s_package_gives_the_same_names(tiny_model, tmp_path, name):
    # No layer of Qwen3's files is without experts.
    tiny = tiny_model(name, **FAMILIES[name], **({"decoder_sparse_step": 1} if name == "qwen3-moe" else {}))
    path, _ = write_sparse_gguf(tmp_path, tiny, name, halves=False)
    [architecture] = [kind for kind, each in gguf.MODEL_ARCH_NAMES.items() if each == LAYOUTS[name].architecture]
    names = gguf.get_tensor_name_map(architecture, tiny.oracle.config.num_hidden_layers)
    with closing(GgufFile(path)) as file:
        written = set(file.tensors)
    for ours in load_file(tiny.path / "model.safetensors"):
        known = re.sub(r"experts\.\d+\.", "experts.", ours).replace(
            "correction_bias", "correction.bias"
        )  # as the converter
        if ".experts." not in known or name != "gpt-oss":  # the converter itself cuts and renames these
            theirs = names.get_name(known, try_suffixes=(".weight", ".bias"))
            assert theirs is not None and {theirs, f"{theirs}.weight", f"{theirs}.bias"} & written, ours
