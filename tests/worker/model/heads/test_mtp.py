"""The layer for multi-token prediction of DeepSeek and GLM: its drafts are a plain computation's, and change no token."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.errors import ConfigError
from sapwood_testing.drafts.answers import assert_alike, run
from sapwood_worker.config import WorkerConfig
from sapwood_worker.core.scheduler.config import SchedulerConfig
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.core.scheduler.speculation.model_drafter import DraftModel
from sapwood_worker.model.runner.builder import build_headed_runner, build_runner
from sapwood_worker.model.runner.factory import make_runner as make_worker_runner
from sapwood_worker.model.runner.model_runner import ModelRunner
from sapwood_worker.model.runner.options import RunnerOptions

WIDTH, LAYERS = 48, 4
PROMPTS = [[3 + at, *range(40, 40 + 4 * at)] for at in range(4)]


def with_head(tiny: Any, folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """The model with a head after its layers, which has the last layer's weights; and what else the head has."""
    shutil.copytree(tiny.path, folder)
    tensors = load_file(folder / "model.safetensors")
    last, own = f"model.layers.{LAYERS - 1}.", f"model.layers.{LAYERS}."
    copied = {own + name.removeprefix(last): each.clone() for name, each in tensors.items() if name.startswith(last)}
    generator = torch.Generator().manual_seed(2)
    extra = {
        "enorm.weight": 1 + 0.1 * torch.randn(WIDTH, generator=generator),
        "hnorm.weight": 1 + 0.1 * torch.randn(WIDTH, generator=generator),
        "eh_proj.weight": torch.randn((WIDTH, 2 * WIDTH), generator=generator) / WIDTH**0.5,
        "shared_head.norm.weight": 1 + 0.1 * torch.randn(WIDTH, generator=generator),
    }
    shared = {
        f"{own}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        f"{own}shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }
    save_file(
        tensors | copied | shared | {own + name: each for name, each in extra.items()}, folder / "model.safetensors"
    )
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, extra


class PlainHead:
    """The head by transformers' own layer, without a cache."""

    def __init__(self, oracle: Any, extra: dict[str, Tensor]) -> None:
        self.model, self.head, self.extra = oracle.model, oracle.lm_head, extra
        self.eps = oracle.config.rms_norm_eps

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.extra[f"{name}.weight"]

    @torch.inference_mode()
    def draft(self, known: list[int], count: int) -> list[int]:
        features = self.model(torch.tensor([known[:-1]])).last_hidden_state[0]
        following, found = known[1:], []
        for _ in range(count):
            token = self.norm(self.model.embed_tokens(torch.tensor(following)), "enorm")
            both = torch.cat((token, self.norm(features, "hnorm")), -1)
            x = (both @ self.extra["eh_proj.weight"].T)[None]
            positions = torch.arange(len(following))[None]
            mask = torch.full((len(following),) * 2, float("-inf")).triu(1)[None, None]
            angles = self.model.rotary_emb(x, positions)
            x = self.model.layers[LAYERS - 1](
                x, attention_mask=mask, position_ids=positions, position_embeddings=angles
            )
            hidden = (x[0] if isinstance(x, tuple) else x)[0]
            found.append(int(self.head(self.norm(hidden[-1], "shared_head.norm")).argmax()))
            following = [*following, found[-1]]
            features = torch.cat((features, hidden[-1:]))
        return found


def options(path: Path, **changes: Any) -> RunnerOptions:
    return RunnerOptions(model_path=path, threads=1, **{"num_pages": 128, "max_running": 8} | changes)


def scheduler_of(runner: ModelRunner) -> Scheduler:
    info, draft = runner.info, runner.draft
    config = SchedulerConfig(
        page_size=info.page_size,
        num_pages=info.num_pages,
        context_length=512,
        max_running=8,
        conservativeness=0.0,
        speculate="off" if draft is None else "prefix",
    )
    return Scheduler(config, drafter=None if draft is None else DraftModel(draft, 512, 64, "mtp", 1))


def asked() -> list[Request]:
    settings = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    return [Request(serial, f"r{serial}", prompt, settings) for serial, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("name", ["glm4-moe", pytest.param("deepseek-v3", marks=pytest.mark.slow)])
def test_it_says_what_a_plain_computation_says_and_changes_no_token(tiny_model: Any, tmp_path: Path, name: str) -> None:
    tiny = tiny_model(name)
    path, extra = with_head(tiny, tmp_path / "model")
    plain = build_runner(options(path))
    expected = run(scheduler_of(plain), plain, False, asked())
    runner = build_headed_runner(options(path, num_pages=24, page_size=8), None)
    scheduler = scheduler_of(runner)
    speculation: Any = scheduler._speculation
    head, fill, seen = PlainHead(tiny.oracle, extra), speculation._drafter.fill, []

    def compared(decodes: Any, drafts: Any) -> Any:
        found = fill(decodes, drafts)
        for request, draft in zip(decodes, found, strict=True):
            if draft:
                assert draft == head.draft(request.token_ids.tolist(), len(draft))
                seen.append(len(draft))
        return found

    speculation._drafter.fill = compared
    speculation._trials.rate = 0.9
    assert_alike(run(scheduler, runner, True, asked()), expected)
    assert sum(seen) > 20 and max(seen) > 3
    assert scheduler.load().drafter == "mtp"


def test_a_model_without_such_layers_is_refused(tiny_model: Any) -> None:
    with pytest.raises(ConfigError, match=r"--speculate mtp: .* holds no layers"):
        make_worker_runner(WorkerConfig(model=str(tiny_model("llama").path), speculate="mtp", num_pages=64))


def test_a_head_that_lacks_a_tensor_is_refused(tiny_model: Any, tmp_path: Path) -> None:
    path, _ = with_head(tiny_model("glm4-moe"), tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    del tensors[f"model.layers.{LAYERS}.hnorm.weight"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"hnorm\.weight is missing"):
        make_worker_runner(WorkerConfig(model=str(path), speculate="mtp", num_pages=64))
