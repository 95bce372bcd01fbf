"""What the factory refuses before ranks meet."""

from __future__ import annotations

from typing import Any

import pytest

from sapwood_common.errors import ConfigError
from sapwood_worker.config import WorkerConfig
from sapwood_worker.model.runner import factory
from sapwood_worker.records.ranks.place import Place


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
