"""What a worker does not do yet with a model whose layers keep states: the settings that it refuses, each with the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sapwood_common.errors import ConfigError
from sapwood_worker.config import WorkerConfig
from sapwood_worker.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Refusal:
    """A setting that is refused.

    Attributes:
        flag: Its flag.
        given: Whether a configuration asks for it.
        why: The reason.
    """

    flag: str
    given: Callable[[WorkerConfig], bool]
    why: str


REFUSED = (
    Refusal(
        "--data-parallel-attention",
        lambda config: config.data_parallel_attention,
        "a rank without requests computes along with the others, and would change a state",
    ),
    Refusal(
        "--pipeline-parallel",
        lambda config: config.pipeline_parallel.stages > 1,
        "a step that is cut for the stages would take snapshots of states in the wrong places",
    ),
    Refusal(
        "--host-cache",
        lambda config: bool(config.host_cache.gb or config.host_cache.ratio),
        "the second tier holds pages without the states that belong to them",
    ),
    Refusal(
        "--role",
        lambda config: config.role != "both",
        "pages are handed to other workers without the states that belong to them",
    ),
    Refusal(
        "--speculate",
        lambda config: config.speculate not in ("auto", "off"),
        "a state cannot go back to where a draft went wrong",
    ),
)
"""By flag. ``--storage`` needs a second tier, so it needs no line."""


def refuse_for_states(config: WorkerConfig, model: ModelConfig) -> None:
    """Refuses what is not done yet with states.

    Raises:
        ConfigError: The model keeps states, and the configuration asks for something of :data:`REFUSED`; names it and why.
    """
    if not model.state_layers:
        return
    found = [f"{each.flag}: {each.why}" for each in REFUSED if each.given(config)]
    if found:
        raise ConfigError(f"{model.architecture} has layers that keep states: {'; '.join(found)}")
