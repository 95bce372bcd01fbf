"""A head of EAGLE-3: its checkpoint is read, what it says is a plain computation's, and drafts with it change no token."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from safetensors.torch import save_file
from torch import Tensor

from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.errors import ConfigError
from sapwood_testing.drafts.answers import (
    VOCAB,
    VOCABULARY,
    assert_alike,
    assert_stopped,
    requests,
    run,
    stop_strings,
    tokens_of,
)
from sapwood_worker.config import WorkerConfig
from sapwood_worker.core.scheduler.config import SchedulerConfig
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.core.scheduler.speculation.model_drafter import DraftModel
from sapwood_worker.model.grammar.llguidance.store import GrammarStore
from sapwood_worker.model.grammar.token_masks import TokenMasks
from sapwood_worker.model.runner.builder import build_headed_runner, build_runner
from sapwood_worker.model.runner.factory import make_runner as make_worker_runner
from sapwood_worker.model.runner.model_runner import ModelRunner
from sapwood_worker.model.runner.options import RunnerOptions

WIDTH, INNER, HEADS, KEYS, DIM = 48, 80, 6, 2, 16
KNOWN = 60
"""Tokens of the head's own vocabulary."""
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "draft_vocab_size": KNOWN,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEYS,
    "head_dim": DIM,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "hidden_act": "silu",
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]},
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


PROMPTS = [[3 + at, *range(40, 40 + at)] for at in range(8)]


def greedy_ones(first: int = 0) -> list[Request]:
    return [Request(first + at, f"g{at}", prompt, GREEDY) for at, prompt in enumerate(PROMPTS)]


def random_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)

    def of(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    known = torch.randperm(VOCAB, generator=generator)[:KNOWN].sort().values
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[known] = True
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    return {
        "fc.weight": of(WIDTH, 3 * WIDTH),
        "midlayer.self_attn.q_proj.weight": of(HEADS * DIM, 2 * WIDTH),
        "midlayer.self_attn.k_proj.weight": of(KEYS * DIM, 2 * WIDTH),
        "midlayer.self_attn.v_proj.weight": of(KEYS * DIM, 2 * WIDTH),
        "midlayer.self_attn.o_proj.weight": of(WIDTH, HEADS * DIM),
        "midlayer.mlp.gate_proj.weight": of(INNER, WIDTH),
        "midlayer.mlp.up_proj.weight": of(INNER, WIDTH),
        "midlayer.mlp.down_proj.weight": of(WIDTH, INNER),
        **{f"midlayer.{name}.weight": 1 + 0.1 * of(WIDTH) for name in norms},
        "norm.weight": 1 + 0.1 * of(WIDTH),
        "lm_head.weight": of(KNOWN, WIDTH),
        "d2t": known - torch.arange(KNOWN),
        "t2d": t2d,
    }


class PlainHead:
    """The head in plain torch, without a cache: all of a text at once."""

    def __init__(
        self, tensors: dict[str, Tensor], oracle: Any, layers: Sequence[int] = (0, 2, 3), *, normed: bool = False
    ) -> None:
        self.t = tensors
        self.oracle = oracle
        self.layers = layers
        self.normed = normed

    def features(self, tokens: list[int]) -> Tensor:
        """Those of each position, by transformers' hidden states."""
        with torch.inference_mode():
            states = self.oracle(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        return torch.cat([states[layer][0] for layer in self.layers], -1) @ self.t["fc.weight"].T

    def hidden(self, features: Tensor, following: list[int]) -> Tensor:
        """Its outputs at each position, given the token after each."""
        t = self.t
        embedded = self.oracle.model.embed_tokens.weight[torch.tensor(following)].detach()
        normed = norm(features, t["midlayer.hidden_norm.weight"])
        both = torch.cat((norm(embedded, t["midlayer.input_layernorm.weight"]), normed), -1)
        count = len(following)
        q, k, v = (
            (both @ t[f"midlayer.self_attn.{name}_proj.weight"].T).view(count, -1, DIM).transpose(0, 1)
            for name in "qkv"
        )
        q, k = turned(q), turned(k)
        k, v = (each.repeat_interleave(HEADS // KEYS, 0) for each in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).reshape(count, -1)
        x = (normed if self.normed else features) + attended @ t["midlayer.self_attn.o_proj.weight"].T
        y = norm(x, t["midlayer.post_attention_layernorm.weight"])
        gate = F.silu(y @ t["midlayer.mlp.gate_proj.weight"].T) * (y @ t["midlayer.mlp.up_proj.weight"].T)
        return x + gate @ t["midlayer.mlp.down_proj.weight"].T

    def say(self, hidden: Tensor) -> int:
        own = int((norm(hidden, self.t["norm.weight"]) @ self.t["lm_head.weight"].T).argmax())
        return own + int(self.t["d2t"][own])

    def draft(self, known: list[int], count: int) -> list[int]:
        """What it says after a text."""
        features = self.features(known[:-1])
        following, found = known[1:], []
        for _ in range(count):
            hidden = self.hidden(features, following)
            found.append(self.say(hidden[-1]))
            following = [*following, found[-1]]
            features = torch.cat((features, hidden[-1:]))
        return found


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def turned(x: Tensor) -> Tensor:
    angles = torch.outer(torch.arange(x.shape[1]).float(), 10000.0 ** -(torch.arange(0, DIM, 2).float() / DIM))
    cos, sin = (each.repeat(1, 2) for each in (angles.cos(), angles.sin()))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def write(folder: Path, tensors: dict[str, Tensor], torchs_own: bool = False, **changes: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    if torchs_own:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


def options(path: Path, **changes: Any) -> RunnerOptions:
    return RunnerOptions(model_path=path, threads=1, **{"num_pages": 128, "max_running": 8} | changes)


def scheduler_of(runner: ModelRunner) -> Scheduler:
    info, draft = runner.info, runner.draft
    config = SchedulerConfig(
        windows=info.windows,
        page_size=info.page_size,
        num_pages=info.num_pages,
        context_length=512,
        eos_token_ids=frozenset({0}),
        max_running=info.max_running,
        conservativeness=0.0,
        speculate="off" if draft is None else "prefix",
    )
    return Scheduler(
        config,
        masks=TokenMasks(VOCAB),
        drafter=None if draft is None else DraftModel(draft, 512, 64, "eagle", 1),
    )


@pytest.fixture(scope="module")
def trained(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random head whose last matrix was fitted to the model's greedy answers, so that some of what it says is right."""
    tiny, tensors = tiny_model("llama"), random_tensors()
    head = PlainHead(tensors, tiny.oracle)
    states, wanted = [], []
    runner = build_runner(options(tiny.path))
    asked = greedy_ones()
    for serial, outputs in run(scheduler_of(runner), runner, False, asked).items():
        text = [*PROMPTS[serial], *tokens_of(outputs)]
        states.append(norm(head.hidden(head.features(text[:-1]), text[1:]), tensors["norm.weight"])[:-1])
        wanted += text[2:]
    x, known = torch.cat(states), torch.arange(KNOWN) + tensors["d2t"]
    y = (torch.tensor(wanted)[:, None] == known).float()
    tensors["lm_head.weight"] = torch.linalg.solve(x.T @ x + 0.001 * torch.eye(WIDTH), x.T @ y).T.contiguous()
    return write(tmp_path_factory.mktemp("eagle") / "trained", tensors)


@pytest.fixture(scope="module")
def store() -> GrammarStore:
    return GrammarStore(VOCABULARY, VOCAB, (0,))


@pytest.mark.parametrize(
    ("page_size", "taken", "changes"),
    [
        pytest.param(1, (0, 2, 3), {}, marks=pytest.mark.slow, id="page-1"),
        pytest.param(16, (0, 2, 3), {}, id="ids-of-inputs"),
        pytest.param(
            16,
            (2, 3),
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}, "norm_before_residual": True},
            id="ids-of-outputs-as-SpecForge-writes-them",
        ),
        pytest.param(
            16,
            (0, 2, 3),
            {"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [3, 0, 2]},
            id="ids-as-vLLM-reads-them",
        ),
    ],
)
def test_what_it_says_is_what_a_plain_computation_says(
    tiny_model: Any, tmp_path: Path, page_size: int, taken: tuple[int, ...], changes: dict[str, Any]
) -> None:
    tiny, tensors = tiny_model("llama"), random_tensors()
    tensors["fc.weight"] = tensors["fc.weight"][:, : len(taken) * WIDTH].contiguous()
    path = write(tmp_path / "head", tensors, torchs_own=page_size == 1, **changes)
    sized = options(tiny.path, page_size=page_size, num_pages=128 * 16 // page_size)
    runner = build_headed_runner(sized, path)
    scheduler = scheduler_of(runner)
    speculation: Any = scheduler._speculation
    plain, fill, seen = (
        PlainHead(tensors, tiny.oracle, taken, normed="norm_before_residual" in changes),
        speculation._drafter.fill,
        [],
    )

    def compared(decodes: Any, drafts: Any) -> Any:
        found = fill(decodes, drafts)
        for request, draft in zip(decodes, found, strict=True):
            if draft:
                assert draft == plain.draft(request.token_ids.tolist(), len(draft))
                seen.append(len(draft))
        return found

    speculation._drafter.fill = compared
    speculation._trials.rate = 0.9  # drafts of some length, right or not
    run(
        scheduler,
        runner,
        True,
        [Request(at, f"r{at}", [3 + at, *range(5, 30)][: 1 + 9 * at], GREEDY) for at in range(3)],
    )
    assert sum(seen) > 20 and max(seen) > 3


def test_tokens_are_those_without_a_head_and_some_of_what_it_says_is_right(
    tiny_model: Any, trained: Path, store: GrammarStore
) -> None:
    path = tiny_model("llama").path
    plain, drafted = build_runner(options(path)), build_headed_runner(options(path, num_pages=40), trained)
    scheduler = scheduler_of(drafted)
    assert_alike(run(scheduler, drafted, True, greedy_ones()), run(scheduler_of(plain), plain, False, greedy_ones()))
    load = scheduler.load()
    assert load.drafter == "eagle"
    assert load.drafted_tokens >= load.accepted_tokens > 15
    chosen = [0, 1, 3, 4, 5, 9, 14, 16]
    expected = run(scheduler_of(plain), plain, False, [requests(store)[at] for at in chosen])
    for _ in range(2):  # the second time on the prefix cache
        assert_alike(run(scheduler, drafted, True, [requests(store)[at] for at in chosen]), expected)
    assert scheduler.load().drafted_tokens > load.drafted_tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page_size", "num_pages", "max_running", "overlap"), [(1, 2048, 32, True), (16, 128, 32, False), (4, 30, 8, True)]
)
def test_twenty_requests_of_every_kind_are_those_without_a_head(
    tiny_model: Any,
    trained: Path,
    store: GrammarStore,
    page_size: int,
    num_pages: int,
    max_running: int,
    overlap: bool,
) -> None:
    path = tiny_model("llama").path
    plain = build_runner(options(path))
    expected = run(scheduler_of(plain), plain, False, requests(store))
    sized = options(path, page_size=page_size, num_pages=num_pages, max_running=max_running)
    drafted = build_headed_runner(sized, trained)
    scheduler, stops = scheduler_of(drafted), stop_strings(expected)
    found = run(scheduler, drafted, overlap, [*requests(store), *greedy_ones(100)], stops)
    for number in range(len(PROMPTS)):  # what it was fitted to: some of it is right
        found.pop(100 + number)
    assert_stopped(found, expected, stops)
    assert_alike(found, expected, stops)
    load = scheduler.load()
    assert load.drafted_tokens > load.accepted_tokens > 0
    assert (scheduler.num_retractions > 0) == (num_pages == 30)


def test_a_request_that_goes_on_at_a_worker_with_another_head_stays_the_same(
    tiny_model: Any, trained: Path, tmp_path: Path
) -> None:
    path = tiny_model("llama").path
    first = build_headed_runner(options(path), trained)
    expected = run(scheduler_of(first), first, True, greedy_ones())
    second = build_headed_runner(options(path, page_size=1, num_pages=1024), write(tmp_path / "head", random_tensors()))
    scheduler = scheduler_of(second)
    resumed = []
    for request in greedy_ones():
        done = tokens_of(expected[request.serial])[: 3 + request.serial]
        sampling = replace(request.sampling, max_tokens=request.sampling.max_tokens - len(done))
        prompt = [*request.token_ids, *done]
        resumed.append(Request(request.serial, "again", prompt, sampling, output_tokens=len(done)))
    found = run(scheduler, second, True, resumed)
    for serial, outputs in found.items():
        assert tokens_of(expected[serial])[: 3 + serial] + tokens_of(outputs) == tokens_of(expected[serial])
    assert scheduler.load().drafted_tokens > 0


@pytest.mark.slow
def test_windows_and_pages_that_run_out_change_no_token(tiny_model: Any, tmp_path: Path, store: GrammarStore) -> None:
    path = write(tmp_path / "head", random_tensors())
    tiny = tiny_model("gemma3").path
    plain = build_runner(options(tiny))
    drafted = build_headed_runner(options(tiny, page_size=4, num_pages=30), path)
    expected = run(scheduler_of(plain), plain, False, requests(store)[:8])
    scheduler = scheduler_of(drafted)
    found = run(scheduler, drafted, True, requests(store)[:8])
    assert {serial: tokens_of(each) for serial, each in found.items()} == {
        serial: tokens_of(each) for serial, each in expected.items()
    }
    assert scheduler.num_retractions > 0 and scheduler.load().drafted_tokens > 0


def _without(name: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.pop(name)


def _reshaped(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: torch.zeros(3, 3)})


@pytest.mark.parametrize(
    ("spoil", "changes", "said"),
    [
        (_without("fc.weight"), {}, "tensor fc.weight is missing"),
        (_without("d2t"), {}, "tensor d2t is missing"),
        (_reshaped("midlayer.mlp.up_proj.weight"), {}, r"up_proj.weight has shape \[3, 3\], not \[80, 48\]"),
        (_reshaped("other.weight"), {}, "tensor other.weight is no part of a head"),
        (lambda tensors: tensors["d2t"].fill_(90), {}, "d2t names tokens that the model does not have"),
        (lambda tensors: None, {"vocab_size": 98}, "98 tokens, this model's 97"),
        (lambda tensors: None, {"eagle_config": None}, r"the layers \[2, 2, 1\] are"),
        (lambda tensors: None, {"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [2, 5]}, "the model has 4"),
        (lambda tensors: None, {"hidden_size": 32, "head_dim": 16}, "not as wide as the model"),
    ],
)
def test_a_checkpoint_that_is_none_for_this_model_is_refused(
    tiny_model: Any, tmp_path: Path, spoil: Any, changes: dict[str, Any], said: str
) -> None:
    tensors = random_tensors()
    spoil(tensors)
    path = write(tmp_path / "head", tensors, **changes)
    with pytest.raises(ConfigError, match=said):
        make_worker_runner(WorkerConfig(model=str(tiny_model("llama").path), speculate=f"eagle:{path}", num_pages=64))
