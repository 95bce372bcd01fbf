"""What the factory refuses before ranks meet."""

from __future__ import annotations

from typing import Any

import pytest

from sapwood_common.errors import ConfigError
from sapwood_worker.config import WorkerConfig
from sapwood_worker.model.runner import factory
from sapwood_worker.records.ranks import Place
from sapwood_worker.settings import ExpertParallel


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"tensor_parallel": 5}, "--tensor-parallel 5: num_attention_heads is "),
        ({"pipeline_parallel": 9}, "--pipeline-parallel 9: num_hidden_layers is 4, fewer than stages"),
    ],
)
def test_a_number_of_ranks_that_does_not_fit_is_refused_before_they_meet(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch, flags: dict[str, int], words: str
) -> None:
    monkeypatch.setattr(factory, "_meet", lambda *_: pytest.fail("they met"))
    config = WorkerConfig(model=str(tiny_model("llama").path), device="cpu", **flags)
    with pytest.raises(ConfigError, match=words):
        factory.make_runner(config, Place(size=config.ranks))


@pytest.mark.parametrize(
    ("experts", "redundant", "words"),
    [
        (9, 0, "--expert-parallel: 9 experts cannot be handed out to 2 ranks"),
        (8, 3, "--expert-parallel redundant: 3 slots cannot be handed out to 2 ranks"),
        (8, 10, "--expert-parallel redundant=10: all 8 experts on all 2 ranks are 8 more"),
        (8, 8, "they met"),
    ],
)
def test_experts_that_do_not_fit_ranks_are_refused_before_these_meet(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch, experts: int, redundant: int, words: str
) -> None:
    def meet(*_: object) -> None:
        raise ConfigError("they met")

    monkeypatch.setattr(factory, "_meet", meet)
    path = str(tiny_model("qwen3-moe-plain", num_experts=experts).path)
    config = WorkerConfig(
        model=path, device="cpu", tensor_parallel=2, expert_parallel=ExpertParallel(on=True, redundant=redundant)
    )
    with pytest.raises(ConfigError, match=words):
        factory.make_runner(config, Place(size=2))
