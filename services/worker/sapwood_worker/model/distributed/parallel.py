"""A rank's groups, and its part of the things that are split over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

from sapwood_common.errors import ConfigError
from sapwood_worker.model.distributed.data_parallel import DataParallelRows, PartialSums
from sapwood_worker.model.distributed.expert_exchange import ExpertExchange
from sapwood_worker.model.distributed.group import Group, ValueT
from sapwood_worker.model.distributed.notes import Notes
from sapwood_worker.model.weight_slot import Span, whole
from sapwood_worker.settings import DispatchName


@dataclass(frozen=True, slots=True)
class Parallel:
    """The groups that a rank belongs to.

    Attributes:
        tp: Tensor parallel: heads, MLP and vocabulary of each layer are split.
        pp: Pipeline parallel: each rank, a *stage*, has some of the layers.
        dp: Data parallel: requests are split.
        ep: Expert parallel: each rank has some of the experts, whole. If this group has one rank, ``tp`` splits each expert
            instead.
        redundant_experts: A layer's additional expert slots, beyond one for each expert, over the ranks of ``ep``.
        rows: With data-parallel attention, how the ranks of ``tp`` exchange their rows to compute MLPs together; None: all ranks
            have all rows.
        dispatch: How such rows go to the experts of ``ep``.
        expert_exchange: Sends rows only to the ranks of their experts; None: rows go to all ranks.
        notes: Exchanges values outside of steps.
    """

    tp: Group = field(default_factory=Group)
    pp: Group = field(default_factory=Group)
    dp: Group = field(default_factory=Group)
    ep: Group = field(default_factory=Group)
    redundant_experts: int = 0
    rows: DataParallelRows | None = None
    dispatch: DispatchName = "gather"
    expert_exchange: ExpertExchange | None = None
    notes: Notes = field(default_factory=Notes)

    @property
    def attending(self) -> Parallel:
        """The groups for attention and vocabulary, which are not split with data-parallel attention."""
        return self if self.rows is None else Parallel(pp=self.pp)

    @property
    def dispatched(self) -> Parallel:
        """The groups for a mixture of experts to which each rank sends its own rows: only the experts are split."""
        return Parallel(
            pp=self.pp, ep=self.ep, redundant_experts=self.redundant_experts, expert_exchange=self.expert_exchange
        )

    @property
    def joined(self) -> Parallel:
        """The groups for MLPs and experts, which all ranks compute together."""
        return self if self.rows is None else replace(self, tp=PartialSums(self.tp))

    def own_layers(self, costs: Sequence[int]) -> range:
        """The layers of this rank's stage, given the cost of each layer.

        Raises:
            ConfigError: There are fewer layers than stages.
        """
        if len(costs) < self.pp.size:
            raise ConfigError(f"--pipeline-parallel: {len(costs)} layers cannot be split over {self.pp.size} stages")
        return split_layers(costs, self.pp.size)[self.pp.rank]

    def exchange(self, value: ValueT, kind: Any) -> list[ValueT]:
        """The values of all ranks that the model is split over, in their order: stage by stage; see :meth:`Group.exchange`."""
        return [each for stage in self.pp.exchange(self.tp.exchange(value, kind), list[kind]) for each in stage]

    def shard(self, what: str, count: int, width: int = 1, *, copies: bool = False) -> Span:
        """This rank's part, by tensor parallelism, of a dimension that holds ``count`` things of ``width`` numbers each.

        Args:
            what: Their name in error messages.
            count: How many there are.
            width: Numbers of each.
            copies: Whether ranks share one thing if there are fewer things than ranks.

        Raises:
            ConfigError: The heads or outputs cannot be split over this many ranks.
        """
        ranks = self.tp.size
        if count % ranks == 0:
            each = count // ranks
        elif copies and ranks % count == 0:
            each = 1
        else:
            raise ConfigError(f"--tensor-parallel {ranks}: {what} is {count}, which cannot be split over so many ranks")
        return Span(self.tp.rank * count // ranks * width, each * width, count * width)

    def own_experts(self, count: int) -> Span:
        """Which of this many experts this rank has, with expert parallelism.

        Raises:
            ConfigError: Ranks would have unequal numbers of experts.
        """
        ranks = self.ep.size
        if count % ranks:
            raise ConfigError(f"--expert-parallel: {count} experts cannot be handed out to {ranks} ranks")
        return Span(self.ep.rank * count // ranks, count // ranks, count)

    def spare_slots(self, experts: int) -> int:
        """How many of a layer's experts this rank has room for beyond its own.

        Raises:
            ConfigError: Ranks would have unequal room, or room for more than all experts.
        """
        most = experts * (self.ep.size - 1)
        if self.redundant_experts > most:
            raise ConfigError(
                f"--expert-parallel redundant={self.redundant_experts}: all {experts} experts on all {self.ep.size} ranks are "
                f"{most} more"
            )
        if self.redundant_experts % self.ep.size:
            raise ConfigError(
                f"--expert-parallel redundant: {self.redundant_experts} slots cannot be handed out to {self.ep.size} ranks"
            )
        return self.redundant_experts // self.ep.size

    def shard_expert(self, what: str, width: int) -> Span:
        """This rank's part of an expert's width: the whole width if ranks have whole experts.

        Args:
            what: Its name in error messages.
            width: The width.

        Raises:
            ConfigError: The model cannot be split over this many ranks.
        """
        return whole(width) if self.ep.size > 1 else self.shard(what, width)

    def shard_rows(self, count: int) -> Span:
        """This rank's part of ``count`` rows: the same number for each rank, except that the last ranks may have fewer."""
        each = -(-count // self.tp.size)
        start = min(self.tp.rank * each, count)
        return Span(start, min(each, count - start), count)


def split_layers(costs: Sequence[int], stages: int) -> list[range]:
    """Neighbouring layers for each stage, at least one, so that the most expensive stage is as cheap as possible. O(layers^2 *
    stages).

    Args:
        costs: What each layer costs; there are at least as many layers as stages.
        stages: How many stages there are.
    """
    before = [0, *accumulate(costs)]
    count = len(costs)
    # For the first n layers: the cost of the most expensive stage, and where the last stage begins.
    best: list[tuple[int, int]] = [(before[n], 0) for n in range(count + 1)]
    starts: list[list[int]] = []
    for stage in range(1, stages):
        best = [
            min((max(best[start][0], before[n] - before[start]), start) for start in range(stage, n))
            if n > stage
            else best[n]
            for n in range(count + 1)
        ]
        starts.append([start for _, start in best])
    ends = [count]
    for each in reversed(starts):
        ends.append(each[ends[-1]])
    return [range(start, end) for start, end in pairwise([0, *reversed(ends)])]
