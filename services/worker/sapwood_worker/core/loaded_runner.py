"""A runner that has loaded its model, as the scheduler process knows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from sapwood_common.grammar.vocabulary import TokenVocabulary
from sapwood_worker.core.tiering import TieredRunner
from sapwood_worker.records.model_info import ModelInfo
from sapwood_worker.records.step import Runner


class DraftRunner(Runner, Protocol):
    """A runner of a draft model.

    Attributes:
        info: Facts about it.
    """

    info: ModelInfo


class LoadedRunner(TieredRunner, Protocol):
    """A runner that knows its model.

    Attributes:
        info: Facts about it.
        vocabulary: Its tokens, where its files hold them and structured output is wanted.
        experts: Asks how many tokens each expert of each layer has got so far: on rank 0 of a group of all layers, else of those
            that this rank has. What it returns waits for the answer. None: the model has none.
        sums: Tells how often each method has summed tensors over the ranks of a layer; None: there is one rank.
    """

    info: ModelInfo
    vocabulary: TokenVocabulary | None
    experts: Callable[[], Callable[[], list[list[int]]]] | None
    sums: Callable[[], dict[str, int]] | None

    def exchanged_bytes(self, tokens: int) -> int:
        """Bytes of rows and of their experts' sums that ranks with whole experts have given each other since the start.

        Args:
            tokens: How many tokens all experts of all layers had got at that time.
        """
        ...

    @property
    def draft(self) -> DraftRunner | None:
        """Runs the draft model, with the same number of pages; None: there is no draft model."""
        ...
