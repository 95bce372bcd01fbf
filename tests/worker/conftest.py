"""What the tests of models share: transformers as the oracle, and a driver that plays the scheduler."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.models.gguf_file import GgufFile
from sapwood_common.models.model_files import demo_path
from sapwood_kernels.ops.factory import device_ops
from sapwood_testing.models.dense_models import DENSE
from sapwood_testing.worker.mooncake_cluster import MooncakeCluster, mooncake_is_installed
from sapwood_testing.worker.steps import Part, step_for
from sapwood_worker.model.loader import load_model
from sapwood_worker.model.runner.builder import build_runner
from sapwood_worker.model.runner.model_runner import ModelRunner
from sapwood_worker.model.runner.options import RunnerOptions
from sapwood_worker.records.step import Step

VOCAB = 97
POISON = 999
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
# Name -> (class of transformers' configuration, what differs from the common values).
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-llama3-rope": ("LlamaConfig", {"rope_parameters": _LLAMA3}),
    "llama-linear-rope": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "llama-yarn": ("LlamaConfig", {"rope_parameters": _YARN}),
    "llama-biased-tied": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral-window": ("MistralConfig", {"sliding_window": 11}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"num_key_value_heads": 3}),
    "qwen3-window": ("Qwen3Config", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 7,
            "sliding_window": 13,
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 8.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 20000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "gemma3-one-kv-head": ("Gemma3TextConfig", {"num_key_value_heads": 1, "sliding_window": 8}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 19}),
    "qwen2-moe": (
        "Qwen2MoeConfig",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 2,
        },
    ),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {
            "num_experts": 12,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "num_hidden_layers": 5,
        },
    ),
    "qwen3-moe-plain": (
        "Qwen3MoeConfig",
        {"num_experts": 8, "num_experts_per_tok": 8, "moe_intermediate_size": 16, "mlp_only_layers": [0, 3]},
    ),
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 3000.0,
    "factor": 8.0,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 64,
}
_LATENT = {
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 16,
    "v_head_dim": 10,
    "q_lora_rank": 20,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}
TINY |= {
    "deepseek-v2": (
        "DeepseekV2Config",
        {**_LATENT, "topk_method": "group_limited_greedy", "rope_parameters": {**_YARN, "mscale": 1.2}},
    ),
    "deepseek-v3": ("DeepseekV3Config", _LATENT),
    "glm4-moe-lite": (
        "Glm4MoeLiteConfig",
        {**_LATENT, "mlp_layer_types": ["dense", "sparse", "dense", "sparse"], "n_shared_experts": 1},
    ),
    "glm4-moe": (
        "Glm4MoeConfig",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "n_shared_experts": 2,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    "gpt-oss": (
        "GptOssConfig",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 9,
            "swiglu_limit": 1.5,
            "rope_parameters": {**_YARN, "truncate": False},
        },
    ),
}
_OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    # A family that is not here.
    "another": ("HeliumConfig", {"hidden_size": 96}),
    # Wide enough for float8 by blocks.
    "wide": (
        "LlamaConfig",
        {
            "hidden_size": 128,
            "intermediate_size": 256,
            "head_dim": 64,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
        },
    ),
}


@dataclass
class Tiny:
    """A tiny random model on disk and transformers' own copy of it."""

    path: Path
    oracle: Any

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """transformers' logits after every token, float32 [T, vocab]."""
        with torch.inference_mode():
            result: torch.Tensor = self.oracle(torch.tensor([tokens])).logits[0]
        return result


@dataclass
class Driver:
    """Plays the scheduler: gives requests pages in random order and runs chunks of their tokens.

    Everything it was told about a request it keeps: tokens, how many of them are cached, and its row of the page table.
    """

    runner: ModelRunner
    rows: int = 16
    step: int = 0
    tokens: dict[int, list[int]] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    prompts: dict[int, int] = field(default_factory=dict)
    entering: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        info = self.runner.info
        pages = np.random.default_rng(7).permutation(info.num_pages).astype(np.int32)
        self.table = pages[: info.num_pages // self.rows * self.rows].reshape(self.rows, -1)

    def add(self, slot: int, tokens: list[int], output_tokens: int = 0) -> None:
        """A new request in row ``slot``; the last ``output_tokens`` are output of before."""
        self.tokens[slot] = list(tokens)
        self.cached[slot] = 0
        self.prompts[slot] = len(tokens) - output_tokens
        self.entering.add(slot)

    def output(
        self, chunks: dict[int, int], sampling: dict[int, SamplingParams] | SamplingParams | None = None
    ) -> Step:
        """A step that computes the next ``chunks[slot]`` tokens of each slot and samples where none are left after."""
        requests = []
        for slot, size in chunks.items():
            start, tokens = self.cached[slot], self.tokens[slot]
            assert start + size <= len(tokens)
            chosen = sampling.get(slot) if isinstance(sampling, dict) else sampling
            requests.append(
                Part(
                    row=slot,
                    token_ids=tokens[start : start + size],
                    start=start,
                    samples=start + size == len(tokens),
                    sampling=chosen or SamplingParams(temperature=0.0),
                    enters=slot in self.entering,
                    history=array("I", tokens),
                    output_start=self.prompts[slot],
                    prompt_length=self.prompts[slot],
                    prompt_logprobs=(chosen or SamplingParams()).prompt_logprobs,
                )
            )
            self.cached[slot] += size
        self.entering -= chunks.keys()
        self.step += 1
        return step_for(self.runner.info, self.step, self.table, requests)

    def execute(
        self, chunks: dict[int, int], sampling: dict[int, SamplingParams] | SamplingParams | None = None
    ) -> dict[int, int]:
        """Runs a step; appends and returns the sampled tokens by slot."""
        result = self.runner.execute(self.output(chunks, sampling))
        sampled = {slot: tokens[0] for slot, tokens in zip(chunks, result.token_ids, strict=True) if tokens}
        for slot, token in sampled.items():
            self.tokens[slot].append(token)
        return sampled

    def generate(
        self,
        prompts: dict[int, list[int]],
        count: int,
        sampling: dict[int, SamplingParams] | SamplingParams | None = None,
    ) -> dict[int, list[int]]:
        """Prefills all prompts in one step and decodes them together; the sampled tokens of each."""
        for slot, prompt in prompts.items():
            self.add(slot, prompt)
        self.execute({slot: len(prompt) for slot, prompt in prompts.items()}, sampling)
        for _ in range(count - 1):
            self.execute(dict.fromkeys(prompts, 1), sampling)
        return {slot: self.tokens[slot][len(prompt) :] for slot, prompt in prompts.items()}


def _randomise(model: Any) -> None:
    """Weights large enough that every part of the model matters, norms included."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            spread = 0.3 if weight.dim() == 1 else 1.5 / weight.shape[-1] ** 0.5
            noise = torch.randn(weight.shape, generator=generator) * spread
            ones = weight.dim() == 1 and "norm" in name and not _is_gemma(model)
            weight.copy_(noise + 1.0 if ones else noise)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.3)


def _is_gemma(model: Any) -> bool:
    """Whether the model stores w of 1 + w in its norms."""
    return "gemma" in model.config.model_type


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tiny]:
    """Builds a tiny random model by its name, saved the way transformers saves it; settings may differ from those in ``TINY``."""
    import transformers

    made: dict[str, Tiny] = {}

    def make(name: str, **others: Any) -> Tiny:
        key = f"{name}-{others}" if others else name
        if key not in made:
            config_class, changes = TINY.get(name) or DENSE.get(name) or _OTHERS[name]
            config = getattr(transformers, config_class)(**{**_COMMON, **changes, **others})
            config._attn_implementation = "eager"
            model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
            _randomise(model)
            model.tie_weights()
            path = tmp_path_factory.mktemp(name)
            model.save_pretrained(path)
            made[key] = Tiny(path, model)
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_names() -> list[str]:
    return list(TINY)


@pytest.fixture(scope="session")
def make_runner() -> Callable[..., ModelRunner]:
    """A runner with a small pool: ``make_runner(path, page_size=16, ...)``."""

    def make(path: Path, **options: Any) -> ModelRunner:
        page_size = options.setdefault("page_size", 16)
        options.setdefault("num_pages", 16 * (-(-256 // page_size)))
        options.setdefault("max_running", 16)
        # Tiny matrices: more threads only wait for each other.
        options.setdefault("threads", 1)
        return build_runner(RunnerOptions(model_path=path, **options))

    return make


@pytest.fixture(scope="session")
def make_driver() -> Callable[[ModelRunner], Driver]:
    return Driver


@pytest.fixture(scope="session")
def demo_runner() -> ModelRunner:
    """The demo model, float32."""
    return build_runner(RunnerOptions(model_path=demo_path(), num_pages=1024, max_running=16, threads=1))


@pytest.fixture(scope="session")
def demo_oracle() -> Any:
    """transformers' Gemma3ForCausalLM with the demo model's weights, dequantised by us to float32."""
    import transformers

    config = _demo_config()
    with torch.device("meta"):
        model = transformers.Gemma3ForCausalLM(config)
    float32 = {"dtype": torch.float32, "stored_weights": "widen"}
    loaded = load_model(demo_path(), "auto", ops=device_ops("cpu"), context_length=None, threads=2, seed=0, **float32)
    state = {}
    for name, slot in loaded.model.weights().items():
        # GGUF and our norms hold 1 + w, transformers w.
        state[name] = slot.target.detach().clone() - 1.0 if slot.norm else slot.target.detach()
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    embedding = model.model.embed_tokens
    embedding.embed_scale = torch.tensor(embedding.scalar_embed_scale)
    return model.eval()


def _demo_config() -> Any:
    """The demo model's shape from its GGUF metadata, read here independently of the product's reader."""
    import transformers

    file = GgufFile(demo_path())
    get = {key.removeprefix("gemma3."): value for key, value in file.metadata.items() if key.startswith("gemma3.")}
    file.close()
    config = transformers.Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=get["embedding_length"],
        intermediate_size=get["feed_forward_length"],
        num_hidden_layers=get["block_count"],
        num_attention_heads=get["attention.head_count"],
        num_key_value_heads=get["attention.head_count_kv"],
        head_dim=get["attention.key_length"],
        max_position_embeddings=get["context_length"],
        rms_norm_eps=get["attention.layer_norm_rms_epsilon"],
        sliding_window=get["attention.sliding_window"],
        query_pre_attn_scalar=get["attention.key_length"],
    )
    config._attn_implementation = "sdpa"
    return config


@pytest.fixture
def mooncake(tmp_path: Path) -> Iterator[MooncakeCluster]:
    """A real Mooncake Store of the test's own."""
    if not mooncake_is_installed():
        pytest.skip("Mooncake is not installed")
    with MooncakeCluster(tmp_path, lend_bytes=256 << 20) as cluster:
        yield cluster


class FakeWorkerProcess:
    """A real worker, front and scheduler in their processes, around the runner that needs no model.

    ``log`` is what it has said so far, all of it after :meth:`wait`; what it says after it listens also goes to the test's own
    standard error, which pytest shows when the test fails. A prompt that begins with POISON makes its step fail.
    """

    def __init__(self, *flags: str, step_ms: float = 1) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "sapwood_testing.worker.fake_worker"),
                *("--port", "0", "--step-ms", str(step_ms), "--poison-token", str(POISON), *flags),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        self.log = ""
        for line in self.process.stderr:
            self.log += line
            if found := re.search(r"listening on ([\w.:]+)", line):
                self.address = found.group(1)
                self._reader = threading.Thread(target=self._pass_on, daemon=True)
                self._reader.start()
                return
        raise AssertionError(f"the worker did not start: {self.log}")

    def _pass_on(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line
            with contextlib.suppress(ValueError):  # pytest has closed it
                print(line, end="", file=sys.stderr)

    def rank_pids(self) -> list[int]:
        """The processes of its ranks, the scheduler's first."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(child) for child in children]

    def scheduler_pid(self) -> int:
        [pid] = self.rank_pids()
        return pid

    def wait(self) -> int:
        code = self.process.wait(timeout=60)
        self._reader.join(timeout=60)
        return code


@pytest.fixture(scope="session")
def fake_worker() -> Callable[..., FakeWorkerProcess]:
    """Starts a worker that the caller stops."""
    return FakeWorkerProcess


@pytest.fixture
def start() -> Iterator[Callable[..., FakeWorkerProcess]]:
    """Starts workers that are killed after the test."""
    running: list[FakeWorkerProcess] = []

    def start_one(*flags: str, step_ms: float = 1) -> FakeWorkerProcess:
        running.append(FakeWorkerProcess(*flags, step_ms=step_ms))
        return running[-1]

    yield start_one
    for worker in running:
        if worker.process.poll() is None:
            worker.process.kill()
            worker.process.wait()


@pytest.fixture(scope="module")
def lend() -> Iterator[Callable[..., FakeWorkerProcess]]:
    """Gives workers to tests that leave them as they found them, caches aside: of one file, those with the same flags are one."""
    lent: dict[tuple[Any, ...], FakeWorkerProcess] = {}

    def lend_one(*flags: str, step_ms: float = 1) -> FakeWorkerProcess:
        if (*flags, step_ms) not in lent:
            lent[*flags, step_ms] = FakeWorkerProcess(*flags, step_ms=step_ms)
        return lent[*flags, step_ms]

    yield lend_one
    for worker in lent.values():
        worker.process.kill()
        worker.process.wait()
