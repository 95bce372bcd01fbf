"""Chooses a model's attention backends, and makes the attention for a pool, with the graphs that replay steps."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sapwood_common.errors import ConfigError
from sapwood_kernels.attention.planned import AttentionShape, Variant
from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.attention.backend import AttentionNeeds
from sapwood_worker.model.attention.fallback import Compiling, meanwhile
from sapwood_worker.model.attention.paged import PagedAttention
from sapwood_worker.model.attention.registry import choose_backend
from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.decoder import DecoderModel
from sapwood_worker.model.heads.head import Head, ShiftedSteps
from sapwood_worker.model.lora.store import LoraStore
from sapwood_worker.model.pools.device_pool import DevicePool
from sapwood_worker.model.runner.options import RunnerOptions
from sapwood_worker.records.kv_layout import KVLayout

if TYPE_CHECKING:
    from sapwood_worker.model.runner.graphs.cuda_graph import DecodeGraphs
    from sapwood_worker.model.runner.graphs.piecewise_graphs import PiecewiseGraphs

logger = logging.getLogger(__name__)


class AttentionBuilder:
    """Makes a runner's attention: for a trial step that measures memory, and for good.

    Args:
        options: The runner's.
        model: The model, or a draft head.
        config: The model's.
        layout: What a page holds.
        dtype: The model's.
        cached: The pool's dtype.
        ops: The device's.
        compiling: Libraries being compiled that the best backends need; fallback backends serve until then. None: nothing is
            being compiled, or the caller waits for it.

    Attributes:
        prefill: What computes prompts.
        decode: What computes decodes.
        waits: Whether the libraries in ``compiling`` must be ready before anything is computed.

    Raises:
        ConfigError: A backend that the options name cannot serve the model, or none can serve its layout.
    """

    def __init__(
        self,
        options: RunnerOptions,
        model: DecoderModel | Head,
        config: ModelConfig,
        layout: KVLayout,
        dtype: torch.dtype,
        cached: torch.dtype,
        ops: DeviceOps,
        compiling: Compiling | None = None,
    ) -> None:
        self._share = options.shared_prefix_attention
        self._alone = options.parallel.rows is None
        self._model = model
        self._config = config
        self._ops = ops
        generates = config.labels is None  # a graph ends with the choice of a token
        self._captures = ops.captures and dtype != torch.float32 and options.cuda_graphs and generates
        self._keeps_states = bool(layout.states)
        kept = {(each.heads, each.dim) for each in layout.paged}
        if len(kept) > 1:  # kernels are planned for one shape
            raise ConfigError(f"{config.architecture}: attention takes no heads of several shapes")
        heads = options.parallel.attending.shard("num_attention_heads", config.num_heads).size
        shape = AttentionShape(heads, *kept.pop(), options.page_size, dtype)
        kinds = tuple(dict.fromkeys(config.kinds))
        self._needs = AttentionNeeds(shape, cached, kinds, config.max_position, latent=config.latent is not None)
        self.prefill = choose_backend(options.attention_backend, "prefill", self._needs, ops)
        self.decode = choose_backend(options.attention_backend, "decode", self._needs, ops)
        other = None if compiling is None else meanwhile(self.prefill, self.decode, self._needs, ops, compiling)
        self.waits = other is None
        if other is not None:
            self.prefill, self.decode = other
        for half, chosen in (("prefill", self.prefill), ("decode", self.decode)):
            logger.info("attention: %s by %s (%s)", half, chosen.name, chosen.reason)

    @property
    def reason(self) -> str:
        """Why these backends were chosen."""
        return "; ".join(dict.fromkeys((self.prefill.reason, self.decode.reason)))

    @torch.inference_mode()
    def backend(
        self,
        pool: DevicePool,
        last_tokens: Tensor,
        drawing: Tensor | None,
        largest: int,
        *,
        whole_ladder: bool,
        shifted: ShiftedSteps | None = None,
        capture: bool = True,
        loras: LoraStore | None = None,
    ) -> tuple[PagedAttention, DecodeGraphs | None]:
        """The attention backend, and the graphs of decode steps where there are any.

        Args:
            pool: Where keys and values are.
            last_tokens: The latest token of the request in each row of the page table.
            drawing: The sampling settings of each row's request; None: the model is a draft head.
            largest: Tokens of the largest graph.
            whole_ladder: Whether the smaller graphs are made too.
            shifted: Shifts the steps of a draft head; None: it is a whole model.
            capture: Whether to capture graphs; else each of their steps is computed once.
            loras: The model's adapters; None: it has none.
        """
        kinds: list[dict[Variant, None]] = [{} for _ in pool.counts]
        for index in pool.layout.layers:
            kinds[pool.group[index]][self._config.kinds[index]] = None
        backend = PagedAttention(
            self._needs,
            pool,
            self._ops,
            self.prefill.backend,
            self.decode.backend,
            [tuple(each) or self._needs.kinds for each in kinds],
            share=self._share,
        )
        make = backend.graphs() if self._captures else None
        if make is None:
            return backend, None
        from sapwood_worker.model.runner.graphs.cuda_graph import DecodeGraphs, ladder

        sizes = ladder(largest) if whole_ladder else [largest]
        # Ranks that compute a step together replay graphs of one size.
        makes = make, backend.shared_graphs() if self._alone else None
        graphs = DecodeGraphs(
            self._model, backend, *makes, pool, sizes, last_tokens, drawing, self._ops, shifted, loras, capture=capture
        )
        return backend, graphs

    def most_captured(self, most: int, *, float8: bool) -> int:
        """Tokens of the largest step of prompts that has graphs; 0: none has. The arguments are those of :meth:`pieces`."""
        if not self._captures or isinstance(self._model, Head) or self._keeps_states:
            return 0  # prompts advance states in pieces of any length
        from sapwood_worker.model.runner.graphs.piecewise_graphs import worth_capturing

        size, layers = self._model.layer_size(), len(self._model.layers)
        return min(most, worth_capturing(size, layers, float8=float8, sparse=self._config.sparse is not None))

    @torch.inference_mode()
    def pieces(
        self, backend: PagedAttention, pool: DevicePool, most: int, *, float8: bool, whole_ladder: bool
    ) -> PiecewiseGraphs | None:
        """The graphs of steps that compute prompts, where there are any.

        Args:
            backend: From :meth:`backend`.
            pool: Where keys and values are.
            most: Tokens of the largest step.
            float8: Whether linear layers are quantised.
            whole_ladder: Whether all sizes are made, or the largest only.
        """
        largest = self.most_captured(most, float8=float8)
        if not largest:
            return None
        assert not isinstance(self._model, Head)
        from sapwood_worker.model.runner.graphs.piecewise_graphs import PiecewiseGraphs, token_ladder

        sizes: Sequence[int] = token_ladder(largest) if whole_ladder else [largest]
        return PiecewiseGraphs(self._model, backend, pool, sizes, self._ops)
