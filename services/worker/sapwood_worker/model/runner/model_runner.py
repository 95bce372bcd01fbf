"""Runs a loaded model on scheduler steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sapwood_common.grammar.vocabulary import TokenVocabulary
from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.attention.paged import PagedAttention
from sapwood_worker.model.families.decoder import DecoderModel
from sapwood_worker.model.grammar.logit_masks import GrammarMasks, StepMasks
from sapwood_worker.model.pools.device_pool import DevicePool
from sapwood_worker.model.pools.host_pool import HostPool
from sapwood_worker.model.pools.transfer import Transfer
from sapwood_worker.model.runner.decode_rows import DecodeRows, decode_rows
from sapwood_worker.model.runner.forward_batch import ForwardBatch
from sapwood_worker.model.runner.input_builder import build_forward_batch
from sapwood_worker.model.runner.launched_step import LaunchedStep
from sapwood_worker.model.runner.pooling import pool_chunk
from sapwood_worker.model.sampling.logprobs import Distribution, Logprobs, join
from sapwood_worker.model.sampling.token_sampler import SampledTokens, TokenSampler
from sapwood_worker.records.model_info import ModelInfo
from sapwood_worker.records.page_copies import NOTHING, CopyReport
from sapwood_worker.records.step import ModelOutput, ScheduledRequest, SchedulerOutput

if TYPE_CHECKING:
    from sapwood_worker.model.runner.cuda_graph import DecodeGraphs
    from sapwood_worker.model.runner.piecewise_graphs import PiecewiseGraphs

# Prompt tokens whose logits are computed at once for log probabilities; more would take more memory.
_LOGPROB_ROWS = 256


class ModelRunner:
    """Implements :class:`sapwood_worker.records.step.Runner`. ``builder.py`` puts it together.

    Args:
        info: Facts about the model and its page pool.
        ops: The device's operations.
        model: The model.
        pool: Keys and values.
        backend: The model's attention.
        graphs: Graphs of decode steps; None: there are none.
        pieces: Graphs of steps that compute prompts; None: there are none.
        masks: Fills grammar masks.
        sampler: Chooses tokens.
        last_tokens: int64 [rows of the page table]: each row's latest token, which ``graphs`` reads too.
        vocabulary: The model's tokens, where its files hold them and structured output is wanted.
        host_pool: The memory of the KV cache's second tier; None: there is none.
        transfer: Copies pages to it and from it.
        identity: Makes :meth:`cache_identity`'s answer.
    """

    def __init__(
        self,
        *,
        info: ModelInfo,
        ops: DeviceOps,
        model: DecoderModel,
        pool: DevicePool,
        backend: PagedAttention,
        graphs: DecodeGraphs | None,
        pieces: PiecewiseGraphs | None,
        masks: GrammarMasks,
        sampler: TokenSampler,
        last_tokens: Tensor,
        vocabulary: TokenVocabulary | None,
        host_pool: HostPool | None,
        transfer: Transfer | None,
        identity: Callable[[], str],
    ) -> None:
        self.info = info
        self.vocabulary = vocabulary
        self.host_pool = host_pool
        self.asynchronous = ops.asynchronous
        self._ops = ops
        self._model = model
        self._pool = pool
        self._backend = backend
        self._graphs = graphs
        self._pieces = pieces
        self._masks = masks
        self._sampler = sampler
        self._last_tokens = last_tokens
        self._transfer = transfer
        self._identity = identity

    def execute(self, output: SchedulerOutput) -> ModelOutput:
        return self.launch(output).result()

    @torch.inference_mode()
    def launch(self, output: SchedulerOutput) -> LaunchedStep:
        requests = output.requests
        if output.copies is not None:
            assert self._transfer is not None, "there is no second tier to copy to"
            self._transfer.start(output.copies)
        if not requests:
            return LaunchedStep(output, (), None, {}, self._copied, self._ops)
        graphs = self._graphs
        if graphs is not None:
            # A graph waits for all layers' loaded pages, other steps layer by layer.
            loads = output.copies is not None and output.copies.load is not None
            rows = decode_rows(requests, self._pool.page_size, graphs.largest, graphs.most_pages, prompts=not loads)
            if rows is not None:
                sampling = [requests[i] for i in rows.sampled]
                with self._masks.start(sampling) as masks:
                    replayed = self._replay(graphs, output, rows, sampling, masks)
                return LaunchedStep(output, rows.sampled, replayed, {}, self._copied, self._ops)
        batch = build_forward_batch(output, self._pool.page_size, self._ops, self._last_tokens)
        sampled = [i for i, request in enumerate(requests) if request.samples]
        sampling = [requests[i] for i in sampled]
        with self._masks.start(sampling) as masks:
            hidden = self._forward(batch)
            tokens: SampledTokens | None = None
            if sampled:
                last = hidden if batch.logit_rows is None else hidden.index_select(0, batch.logit_rows)
                tokens = self._sampler.sample(self._model.logits(last), sampling, masks)
                self._keep(tokens, self._ops.to_device(np.array([request.slot for request in sampling])))
        prompts: dict[int, Logprobs] = {}
        for i, request in enumerate(requests):
            if request.prompt_logprobs is not None and request.start + 1 < request.prompt_length:
                first = int(batch.attention.query_starts[i])
                prompts[i] = self._prompt_logprobs(hidden[first : first + len(request.token_ids)], request)
        pooled: dict[int, Tensor] = {}
        for i, request in enumerate(requests):
            if request.pooling:
                first = int(batch.attention.query_starts[i])
                normed = self._model.norm(hidden[first : first + len(request.token_ids)])
                pooled[i] = pool_chunk(normed, request.pooling)
        return LaunchedStep(output, sampled, tokens, prompts, self._copied, self._ops, pooled)

    def cache_identity(self) -> str:
        """What a page's content depends on besides its tokens and the page size: equal only if pages can be exchanged.

        Reads all of the model's files.
        """
        return self._identity()

    @torch.inference_mode()
    def logits(self, output: SchedulerOutput) -> Tensor:
        """Runs a step like :meth:`execute` but returns the logits after every token, float32 [T, vocab_size]."""
        hidden = self._forward(build_forward_batch(output, self._pool.page_size, self._ops))
        return self._model.logits(hidden).float()

    def _copied(self) -> CopyReport:
        return NOTHING if self._transfer is None else self._transfer.poll()

    def _forward(self, batch: ForwardBatch) -> Tensor:
        if self._pieces is not None and len(batch.token_ids) <= self._pieces.largest:
            return self._pieces.run(batch)
        hidden: Tensor = self._model(batch.token_ids, batch.positions, self._backend.plan(batch.attention))
        return hidden

    def _replay(
        self,
        graphs: DecodeGraphs,
        output: SchedulerOutput,
        rows: DecodeRows,
        sampling: Sequence[ScheduledRequest],
        masks: StepMasks,
    ) -> SampledTokens | None:
        width = int(rows.positions.max()) // self._pool.page_size + 1
        self._pool.await_all()
        result = graphs.run(rows.token_ids, rows.positions, output.page_table[rows.slots, :width], rows.slots)
        if not sampling:
            return None
        if rows.last is not None:
            result = result.select(self._ops.to_device(rows.last))
        tokens = self._sampler.sample(result.logits, sampling, masks, (result.largest, result.greedy))
        self._keep(tokens, result.slots)
        return tokens

    def _keep(self, tokens: SampledTokens, slots: Tensor) -> None:
        """Keeps a step's tokens on the device for the next step; 0 where none was sampled, as that request ends."""
        self._last_tokens.index_copy_(0, slots, tokens.tokens.clamp(min=0))

    def _prompt_logprobs(self, hidden: Tensor, request: ScheduledRequest) -> Logprobs:
        """Log probabilities of the prompt tokens, at least one, that follow a chunk's tokens; ``hidden`` are the chunk's."""
        assert request.prompt_logprobs is not None
        first = request.start + 1
        following = request.history[first : min(first + len(hidden), request.prompt_length)]
        tokens = self._ops.to_device(np.array(following, np.int64))
        parts = []
        for start in range(0, len(tokens), _LOGPROB_ROWS):
            chosen = tokens[start : start + _LOGPROB_ROWS]
            logits = self._model.logits(hidden[start : start + len(chosen)]).float()
            parts.append(Distribution(logits, request.prompt_logprobs).of(chosen))
        return join(parts)
