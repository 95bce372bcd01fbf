"""Runs a loaded model on scheduler steps."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from sapwood_common.errors import UnimplementedError
from sapwood_common.grammar.vocabulary import TokenVocabulary
from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model import released_memory
from sapwood_worker.model.attention.paged import PagedAttention
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.distributed.pipeline import MicroBatches
from sapwood_worker.model.families.decoder import DecoderModel
from sapwood_worker.model.heads.head import Head, ShiftedSteps
from sapwood_worker.model.live_weights import LiveWeights
from sapwood_worker.model.lora.store import LoraStore
from sapwood_worker.model.pools.device_pool import DevicePool
from sapwood_worker.model.pools.host_pool import HostPool
from sapwood_worker.model.pools.page_copier import PageCopier
from sapwood_worker.model.pools.peer_pages import CudaMemory, OwnPool
from sapwood_worker.model.pools.torch_transfer import Transfer, marked
from sapwood_worker.model.runner.forward_batch import build_forward_batch
from sapwood_worker.model.runner.graphs.decode_rows import DecodeRows, DraftedTokens, decode_rows
from sapwood_worker.model.runner.pictures import PictureEncoder
from sapwood_worker.model.runner.pooling import Pooler
from sapwood_worker.model.sampling.positions import Positions
from sapwood_worker.model.sampling.token_sampler import Distribution, Logprobs, SampledTokens, TokenSampler, join
from sapwood_worker.records.expert_load import ExpertMove
from sapwood_worker.records.lora import Lora, LoraFacts
from sapwood_worker.records.model_info import ModelInfo
from sapwood_worker.records.output import Pooling, TokenLogprobs
from sapwood_worker.records.pictures import Picture, PictureUse
from sapwood_worker.records.step import (
    NOTHING,
    CopyReport,
    DeferredStep,
    Entry,
    IntArray,
    LateTokens,
    ModelOutput,
    RankLostError,
    Step,
    settled,
)
from sapwood_worker.records.weights import Memory, TrainerGroup, WeightBucket, WeightsFacts

if TYPE_CHECKING:
    from sapwood_worker.model.runner.graphs.cuda_graph import DecodeGraphs, DecodeResult
    from sapwood_worker.model.runner.graphs.piecewise_graphs import PiecewiseGraphs
    from sapwood_worker.model.runner.graphs.recorded_steps import RecordedSteps

# How many prompt tokens have their logits computed at once for log probabilities; more would take more memory.
_LOGPROB_ROWS = 256


class ModelRunner:
    """Implements :class:`sapwood_worker.records.step.Runner`. ``builder.py`` puts it together.

    Args:
        info: Facts about the model and its page pool.
        ops: The device's operations.
        model: The model.
        pooler: Makes embeddings of its hidden states; None: it is a head.
        pool: Keys and values.
        backend: The model's attention.
        graphs: Graphs of decode steps; None: there are none.
        pieces: Graphs of steps that compute prompts; None: there are none.
        sampler: Chooses tokens.
        last_tokens: int64 [rows of the page table]: each row's latest token, which ``graphs`` reads too.
        vocabulary: The model's tokens, if its files hold them and structured output is wanted.
        host_pool: The memory of the KV cache's second tier; None: there is none.
        transfer: Copies pages to it and from it.
        copier: Copies pages within the pool.
        identity: Makes :meth:`cache_identity`'s answer.
        cuts: Cuts steps for the stages of a pipeline; None: there is one stage.
        shifted: Shifts steps for a head that drafts; None: it is a whole model.
        parallel: The groups of ranks.
        recorded: Runs decodes from recordings; None: nothing is recorded.
        loras: The adapters; None: it serves none.
        weights: Changes the model's weights; None: it drafts.
        pictures: Encodes pictures; None: the model takes none.

    Attributes:
        info, ops, recorded, loras, weights, pictures: The arguments.
        deferred: Steps that wait for the last stage; None: this is the last one, or all.
        sums: Returns how often each method has summed tensors over the ranks of a layer; None: there is one rank.
        draft: Runs the draft model, with the same number of pages; None: there is no draft model.
    """

    def __init__(
        self,
        *,
        info: ModelInfo,
        ops: DeviceOps,
        model: DecoderModel | Head,
        pooler: Pooler | None = None,
        pool: DevicePool,
        backend: PagedAttention,
        graphs: DecodeGraphs | None,
        pieces: PiecewiseGraphs | None,
        sampler: TokenSampler,
        last_tokens: Tensor,
        vocabulary: TokenVocabulary | None,
        host_pool: HostPool | None,
        transfer: Transfer | None,
        copier: PageCopier,
        identity: Callable[[], str],
        cuts: MicroBatches | None = None,
        shifted: ShiftedSteps | None = None,
        parallel: Parallel = Parallel(),  # noqa: B008 - it holds nothing
        recorded: RecordedSteps | None = None,
        loras: LoraStore | None = None,
        weights: LiveWeights | None = None,
        pictures: PictureEncoder | None = None,
    ) -> None:
        self.info = info
        self.weights = weights
        self.draft: ModelRunner | None = None
        self.vocabulary = vocabulary
        self.experts = None if isinstance(model, Head) or not model.sparse else self._ask_experts
        self.sums: Callable[[], dict[str, int]] | None = None
        if parallel.tp.sums is not None:
            self.sums = partial(ops.aside, parallel.tp.counts)
        self.host_pool = host_pool
        self.asynchronous = ops.asynchronous
        self.ops = ops
        self._model, self._pooler = model, pooler
        self._pool = pool
        self._backend = backend
        self._graphs = graphs
        self._pieces = pieces
        self._sampler = sampler
        self._last_tokens = last_tokens
        self._transfer = transfer
        self._copier = copier
        self._identity = identity
        self._cuts = cuts
        self._own_rows = parallel.rows
        self._link = None if isinstance(model, Head) else model.link
        # Stages have different numbers of layers, but must compute a step in the same way.
        stages = parallel.pp.size
        self._layers = len(pool.layout.layers) if stages == 1 else -(-model.config.num_layers // stages)
        self._shifted = shifted
        self.recorded, self.loras, self.pictures = recorded, loras, pictures
        self.check_pictures: Callable[[Sequence[Picture], array[int]], None] | None = (
            None if pictures is None else pictures.check
        )
        self.picture_use: Callable[[], PictureUse] | None = None if pictures is None else lambda: pictures.use
        self.deferred = None if self._link is None or self._link.last else DeferredSteps(stages - 1 - parallel.pp.rank)
        self._entries: dict[int, Entry] = {}
        # For each row of the page table: the position after which its request wants only sampled tokens.
        self._plain_from = np.zeros(len(last_tokens), np.int64)
        # And the slot of its adapter.
        self._lora_slots = np.full(len(last_tokens), -1)

    def execute(self, step: Step) -> ModelOutput:
        return self.launch(step).result()

    @torch.inference_mode()
    def launch(self, step: Step) -> LaunchedStep | DeferredStep:
        if self.draft is not None:
            self.draft.forget()
        if not isinstance(step.late, DraftedTokens) or self._sampler.looks_back(step.rows):
            step.settle()
        if self._transfer is None or step.copies is None or step.copies.during is None:
            return self._launch(step)
        try:
            launched = self._launch(step)
        except BaseException:
            self._transfer.finish(failed=True)
            raise
        self._transfer.finish()
        return launched

    def _launch(self, step: Step) -> LaunchedStep | DeferredStep:
        if step.moves:
            self._move_experts(step.moves)
        if step.copies is not None:
            assert self._transfer is not None, "there is no second tier to copy to"
            self._transfer.start(step.copies)
        if len(step.page_copies):
            self._copier.copy(step.page_copies)
        self._begin_rows(step)
        self._sampler.publish()
        if self._own_rows is not None and len(step.rank_tokens):
            self._own_rows.begin(step.rank_tokens.tolist())
        if not len(step.rows):
            if len(step.rank_tokens):
                self._keep_pace(step)
            return LaunchedStep(step, None, None, {}, self._copied, self.ops, seen=self._seen(step))
        if self.deferred is not None:
            self.deferred.make_way(step)
        asks = step.starts < self._plain_from[step.rows]
        explained = np.flatnonzero(asks).tolist() if np.count_nonzero(asks) else []
        seeing = self.pictures is not None and self.pictures.concern(step)
        scores = bool(len(step.scored))
        if self._graphs is not None and not explained and not scores and not seeing and self._graphed(step):
            # A graph waits for the loaded pages of all layers; other steps wait layer by layer.
            loads = step.copies is not None and step.copies.load is not None
            rows = self._rows(self._graphs, step, prompts=not loads)
            if rows is not None:
                return self._finished(step, self._replay(self._graphs, step, rows))
        step.settle()
        at = Positions.of(step)
        hidden = self._forward(step)
        finish = partial(self._finish, step, at, hidden, explained, self._backend.take_spared())
        if not (explained or scores):
            return self._finished(step, finish)
        if self.deferred is not None:
            self.deferred.finish()  # tensors from the last stage are received in the order of the steps
        return finish()

    def _finished(self, step: Step, finish: Callable[[], LaunchedStep]) -> LaunchedStep | DeferredStep:
        """Finishes a step whose layers have been launched: at once, or when the last stage may have reached the step."""
        defers = self.deferred is not None and self.info.micro_batches > 1
        return self.deferred.add(step, finish) if defers and self.deferred is not None else finish()

    def follow(self, step: Step, rows: DecodeRows, tokens: Tensor, computed: Tensor) -> None:
        """Computes a draft head on the tokens that a check has sampled, at all positions, and may begin the next draft;
        asynchronous. This class is no head, so it does nothing.

        Args:
            step: The model's step that checks drafts; it computes nothing else.
            rows: Its rows.
            tokens: int64 [T]: the tokens that it sampled.
            computed: int64 [T]: the tokens that it computes; valid for what is queued before the model's next step.
        """

    def forget(self) -> None:
        """Forgets the results of :meth:`follow`, because the requests have advanced."""

    @torch.inference_mode()
    def _finish(self, step: Step, at: Positions, hidden: Tensor, explained: list[int], spared: int) -> LaunchedStep:
        """Samples from the layers' output; takes part in the computation after the last stage."""
        tokens = None
        if len(at.rows):
            places, rows = self.ops.to_device(np.stack((step.sampled(), at.rows)))
            if self._link is not None and not self._link.last:
                last = self._link.empty(len(rows))
            else:
                whole = len(rows) == len(hidden) and not len(step.joins)
                last = hidden if whole else hidden.index_select(0, places)
            tokens = self._sampler.sample(self._model.logits(last), step, at)
            if at.drafts is None:
                self._keep(tokens, rows)
        prompts: dict[int, Logprobs] = {}
        pooled: dict[int, Tensor] = {}
        ends = np.cumsum(step.counts)
        for i in explained:
            entry = self._entries[int(step.rows[i])]
            end = int(ends[i])
            first = end - int(step.counts[i])
            if entry.pooling:
                pooled[i] = self._pool_chunk(hidden[first:end], entry.pooling)
            elif (skipped := max(0, entry.sampling.prompt_logprobs_start - int(step.starts[i]))) < end - first:
                start = int(step.starts[i]) + skipped
                prompts[i] = self._prompt_logprobs(hidden[first + skipped : end], start, entry)
        seen, scored = self._seen(step), self._score(step, hidden) if len(step.scored) else None
        return LaunchedStep(step, at, tokens, prompts, self._copied, self.ops, pooled, spared, seen, scored)

    def read_lora(self, lora: Lora) -> LoraFacts:
        """As :meth:`sapwood_worker.core.loaded_runner.LoadedRunner.read_lora`."""
        if self.loras is None:
            raise UnimplementedError("this worker has no slots for adapters: start it with --lora-slots")
        return self.loras.read(lora)

    def drop_lora(self, number: int) -> None:
        """As :meth:`sapwood_worker.core.loaded_runner.LoadedRunner.drop_lora`."""
        if self.loras is not None:
            self.loras.drop(number)

    def stage_weights(self, bucket: WeightBucket) -> WeightsFacts:
        """As :meth:`sapwood_worker.core.loaded_runner.LoadedRunner.stage_weights`."""
        return self._changing().stage(bucket)

    def ready_weights(self, update: int, *, partial: bool) -> WeightsFacts:
        """As :meth:`sapwood_worker.core.loaded_runner.LoadedRunner.ready_weights`."""
        return self._changing().ready(update, partial=partial)

    def exchange_weights(self, update: int, *, keep: bool) -> bytes:
        """As :meth:`sapwood_worker.core.loaded_runner.LoadedRunner.exchange_weights`."""
        weights = self._changing()
        weights.exchange(update, keep=keep)
        return weights.digest

    def drop_weights(self, update: int) -> None:
        """As :meth:`sapwood_worker.core.loaded_runner.LoadedRunner.drop_weights`."""
        self._changing().drop(update)

    def join_group(self, group: TrainerGroup) -> None:
        """As :meth:`sapwood_worker.core.loaded_runner.LoadedRunner.join_group`."""
        self._changing().groups.join(group)

    def leave_group(self, name: str) -> bool:
        """As :meth:`sapwood_worker.core.loaded_runner.LoadedRunner.leave_group`."""
        return self._changing().groups.leave(name)

    def release_memory(self, memory: Sequence[Memory], folder: str) -> int:
        """As :meth:`sapwood_worker.core.loaded_runner.LoadedRunner.release_memory`."""
        if self.asynchronous:
            raise UnimplementedError("a GPU's memory is not given back: stop the worker instead")
        size = 0
        if "weights" in memory:
            size += self._changing().release(Path(folder))
        if "kv_cache" in memory:
            size += released_memory.release(released_memory.storages(self._pool.pages.values()))
        return size

    def restore_memory(self, memory: Sequence[Memory], folder: str) -> None:
        """As :meth:`sapwood_worker.core.loaded_runner.LoadedRunner.restore_memory`; pages are there when they are written."""
        if "weights" in memory:
            self._changing().restore(Path(folder))

    def _changing(self) -> LiveWeights:
        if self.weights is None:
            raise UnimplementedError("this model's weights cannot be changed while it serves")
        return self.weights

    def exchanged_bytes(self, tokens: int) -> int:
        """Bytes of rows and of expert sums that ranks with whole experts have sent each other since the start.

        Args:
            tokens: How many tokens all experts of all layers had got, by the last read of :attr:`experts`.
        """
        exchange = None if isinstance(self._model, Head) else self._model.exchange
        return round(tokens * self.info.expert_exchange) if exchange is None else exchange.exchanged_bytes(tokens)

    def cache_identity(self) -> str:
        """What a page's content depends on besides its tokens and the page size: equal only if pages can be exchanged.

        Reads all of the model's files.
        """
        return self._identity()

    def own_pool(self) -> OwnPool | None:
        """The device's pages, for reads by other processes of the host and for copies into them; None: a page has several parts.

        Raises:
            OSError, RuntimeError: There is no GPU.
        """
        layers, device = self._pool.layers_in_records(), self._pool.device
        if device.type != "cuda":
            raise RuntimeError("the model does not run on a GPU")
        memory = CudaMemory(device.index or 0)
        return OwnPool(layers, memory, lambda: marked(device)) if layers else None

    @torch.inference_mode()
    def logits(self, step: Step) -> Tensor:
        """Runs a step like :meth:`execute` but returns the logits after every token, float32 [T, vocab_size]."""
        self._begin_rows(step)
        return self._model.logits(self._forward(step)).float()

    def _ask_experts(self) -> Callable[[], list[list[int]]]:
        """How many tokens each expert of this stage's layers has got with the steps launched so far; reading the result waits for
        them."""
        assert not isinstance(self._model, Head)
        if not self._model.mixtures:
            return list
        tensors, exchange = [self._model.expert_tokens()], self._model.exchange
        copies = self.ops.to_host(tensors if exchange is None else [*tensors, exchange.moved])

        def wait() -> list[list[int]]:
            counts, *moved = (each.tolist() for each in copies.wait())
            if exchange is not None:
                exchange.told = moved[0]
            return cast("list[list[int]]", counts)

        return wait

    def _begin_rows(self, step: Step) -> None:
        """Takes note of the requests that get a row with a step, and puts their adapters into slots."""
        if step.lora_loads:
            assert self.loras is not None, "there are no slots"
            self.loras.load(step.lora_loads)
        for entry in step.entries:
            self._enter(entry)
        if self._pool.states is not None and step.entries:
            rows, snapshots = np.array([(each.row, each.snapshot) for each in step.entries], np.int64).T
            self._pool.states.begin(rows, snapshots, self.ops)

    def _enter(self, entry: Entry) -> None:
        self._sampler.enter(entry)
        self._entries[entry.row] = entry
        scored = entry.prompt_length - 1 if entry.prompt_logprobs is not None else 0
        self._lora_slots[entry.row] = entry.lora_slot
        if self.pictures is not None:
            self.pictures.enter(entry.row, entry.pictured)
        self._plain_from[entry.row] = np.iinfo(np.int64).max if entry.pooling else scored

    def _move_experts(self, moves: Sequence[ExpertMove]) -> None:
        assert not isinstance(self._model, Head)
        try:
            self._model.move_experts(moves)
        except Exception as error:  # the ranks may no longer know which rank has which rows
            raise RankLostError(f"experts could not be moved: {error}") from error

    def _copied(self) -> CopyReport:
        return NOTHING if self._transfer is None else self._transfer.poll()

    def _seen(self, step: Step) -> Tensor | None:
        """The digest of the rows that all ranks computed in a step, with data-parallel attention."""
        return self._own_rows.seen if self._own_rows is not None and len(step.rank_tokens) else None

    def _graphed(self, step: Step) -> bool:
        """Whether a step may be computed by a decode graph: the ranks that compute it together all do, or none does."""
        assert self._graphs is not None
        return not len(step.rank_tokens) or (step.decodes and int(step.rank_tokens.max()) <= self._graphs.largest)

    def _keep_pace(self, step: Step) -> None:
        """Joins the other ranks' MLPs in a step in which this rank has no tokens."""
        scratch = np.array([self._pool.scratch_slots()]) // self._pool.page_size
        zero, one = np.zeros(1, np.int64), np.ones(1, np.int64)
        idle = replace(step, rows=zero, starts=zero, counts=one, samples=zero, token_ids=zero)
        idle.pages = scratch.astype(np.int32)
        if self._graphs is not None and self._graphed(step):
            rows = DecodeRows(idle.token_ids, idle.starts, idle.rows, idle.pages, None, None)
            self._graphs.run(rows, step.rank_tokens.tolist(), idle=True)
        else:
            self._compute(idle, idle=True)

    def _forward(self, step: Step) -> Tensor:
        """The hidden states after every token, [T, hidden_size]."""
        cuts = [step] if self._cuts is None else self._cuts.of(step)
        if len(cuts) == 1:
            return self._compute(step)
        return torch.cat([self._compute(each).clone() for each in cuts])

    def _rows(self, graphs: DecodeGraphs, step: Step, *, prompts: bool) -> DecodeRows | None:
        """The rows of a decode graph, if a step can be computed by one."""
        if self._pool.states is not None:  # each of a prompt's tokens needs the state after the one before
            if step.again.any():
                return None
            prompts = False
        size, shifted, layers = self._pool.page_size, self._shifted, self._layers
        shown = step if shifted is None else shifted.shift(step)
        rows = decode_rows(shown, size, graphs.largest, graphs.most_pages, prompts=prompts, layers=layers)
        return rows if rows is None or shifted is None else replace(rows, left=shifted.left(step))

    def _compute(self, step: Step, *, idle: bool = False) -> Tensor:
        shown = step if self._shifted is None else self._shifted.shift(step)
        size, tables, scratch = self._pool.page_size, len(self._pool.counts), self._pool.scratch_slots()
        batch = build_forward_batch(shown, size, self.ops, self._last_tokens, tables, self._pool.states, scratch)
        of_ranks = step.rank_tokens.tolist()
        slots = np.repeat(self._lora_slots[step.rows], step.counts)
        adapted = self.loras is not None and bool((slots >= 0).any())
        seeing = self.pictures is not None and self.pictures.concern(step)
        plain = not adapted and not seeing
        if self._pieces is not None and plain and max((len(batch.token_ids), *of_ranks)) <= self._pieces.largest:
            return self._pieces.run(batch, of_ranks, idle=idle)
        attention = batch.attention
        if seeing and self.pictures is not None:
            attention = self.pictures.reaching(step, attention)
        plan = self._backend.plan(attention)
        if self.recorded is not None and plain and (found := self.recorded.run(batch, plan)) is not None:
            return found
        with self.loras.computing(slots) if self.loras is not None and adapted else nullcontext():
            if seeing and self.pictures is not None:
                positions, seen = self.pictures.of(step, batch.positions)
                hidden: Tensor = self._model(batch.token_ids, positions, plan, seen)
            else:
                hidden = self._model(batch.token_ids, batch.positions, plan)
        if self._shifted is not None:
            self._shifted.leave(hidden, self.ops.to_device(self._shifted.left(step)))
        return hidden

    def _replay(self, graphs: DecodeGraphs, step: Step, rows: DecodeRows) -> Callable[[], LaunchedStep]:
        """Replays a step's layers; returns a function that computes the rest."""
        self._pool.await_all()
        late = step.late.rows_of(step.token_ids) if isinstance(step.late, DraftedTokens) else None
        slots = self._lora_slots[rows.slots]
        adapters = slots if self.loras is not None and (slots >= 0).any() else None
        find = graphs.begin(rows, step.rank_tokens.tolist(), late=late, adapters=adapters)
        if self._pool.states is not None and len(step.saves):
            self._pool.states.save(step.rows[step.saves[:, 0]], step.saves[:, 2], self.ops)
        at = Positions.of(step)  # the device computes meanwhile
        return partial(self._finish_replay, step, at, rows, find, self._backend.take_spared())

    @torch.inference_mode()
    def _finish_replay(
        self, step: Step, at: Positions, rows: DecodeRows, find: Callable[[], DecodeResult], spared: int
    ) -> LaunchedStep:
        result, tokens = find(), None
        if len(at.rows):
            if rows.last is not None:
                result = result.select(self.ops.to_device(rows.last))
            drawn, slots = result.drawn, result.slots
            if len(step.joins):  # the graph has drawn for the rows of its parts only
                drawn, slots = None, self.ops.to_device(at.rows)
            tokens = self._sampler.sample(result.logits, step, at, result.greedy, drawn)
            if at.drafts is None:
                self._keep(tokens, slots)
        seen = self._seen(step)
        launched = LaunchedStep(step, at, tokens, {}, self._copied, self.ops, spared_tokens=spared, seen=seen)
        if self.draft is not None and tokens is not None and at.drafts is not None and rows.last is None:
            assert self._graphs is not None
            self.draft.follow(step, rows, tokens.tokens, self._graphs.computed(len(rows.token_ids)))
        return launched

    def _keep(self, tokens: SampledTokens, slots: Tensor) -> None:
        """Keeps each request's latest token on the device for the next step; 0 if none was sampled, because that request ends.
        After a check of drafts this is not needed: the host knows the tokens before it plans.

        Args:
            tokens: The step's, one of each request.
            slots: int64 [R]: the row of the page table of each.
        """
        self._last_tokens.index_copy_(0, slots, tokens.tokens.clamp(min=0))

    def _pool_chunk(self, hidden: Tensor, pooling: Pooling) -> Tensor:
        if pooling == "labels":
            return self._model.logits(hidden[-1:])[0].float()
        assert not isinstance(self._model, Head) and self._pooler is not None
        return self._pooler.pool(self._model.normed(hidden), pooling)

    def _prompt_logprobs(self, hidden: Tensor, start: int, entry: Entry) -> Logprobs:
        """Log probabilities of prompt tokens, at least one: those that follow the tokens from ``start`` on, whose states are
        ``hidden``."""
        assert entry.prompt_logprobs is not None
        following = np.frombuffer(entry.tokens, np.uint32)[
            start + 1 : min(start + 1 + len(hidden), entry.prompt_length)
        ]
        tokens = self.ops.to_device(following.astype(np.int64))
        parts = []
        for start in range(0, len(tokens), _LOGPROB_ROWS):
            chosen = tokens[start : start + _LOGPROB_ROWS]
            logits = self._model.logits(hidden[start : start + len(chosen)]).float()
            parts.append(Distribution(logits, entry.prompt_logprobs).of(chosen))
        return join(parts)

    def _score(self, step: Step, hidden: Tensor) -> Tensor:
        """float32 [K]: the log probabilities of ``step.scored``. Each place's logits are computed once."""
        parts, places, tokens = step.scored.T
        rows, which = np.unique((np.cumsum(step.counts) - step.counts)[parts] + places, return_inverse=True)
        found: list[Tensor] = []
        order = np.argsort(which, kind="stable")
        for start in range(0, len(rows), _LOGPROB_ROWS):
            chosen = self.ops.to_device(rows[start : start + _LOGPROB_ROWS])
            logits = self._model.logits(hidden.index_select(0, chosen)).float()
            mine = order[(which[order] >= start) & (which[order] < start + len(chosen))]
            at, ids = self.ops.to_device(np.stack((which[mine] - start, tokens[mine])))
            found.append(logits[at, ids] - logits.logsumexp(-1)[at])
        back = self.ops.to_device(np.argsort(order, kind="stable"))
        return torch.cat(found).index_select(0, back)


# Steps whose layers a stage of a pipeline has launched, but not yet what follows the last stage.
# The computing queue waits for a step's tensor from the last stage.
# So this stage runs the layers of later steps
# first, one step for each stage after this one; those stages compute meanwhile. Stages cannot wait for each other in a circle:
# an earlier stage defers at least as many steps as a later one, whose layers need its output. A step never overtakes one that
# samples a token that the step computes and the host does not know.
class DeferredSteps:
    """The steps, in the order of their launch.

    Args:
        after: Stages after this one. With the step that is being launched, at most one more is deferred.

    Attributes:
        overtaken: How many steps were finished after the layers of a later step were launched, so that two steps were in the
            pipeline.
    """

    def __init__(self, after: int) -> None:
        self.overtaken = 0
        self._most = after
        self._waiting: list[tuple[DeferredStep, IntArray]] = []

    def make_way(self, step: Step) -> None:
        """Finishes the steps that must come before a step's layers."""
        self._waiting = [each for each in self._waiting if not each[0].finished]
        if not self._waiting:
            return
        owners = np.repeat(step.rows, step.counts)[step.token_ids == -1]
        needed = [place for place, (_, rows) in enumerate(self._waiting, 1) if np.isin(rows, owners).any()]
        count = max(len(self._waiting) - self._most, *needed, 0)
        for each, _ in self._waiting[:count]:
            each.finish()
        del self._waiting[:count]
        self.overtaken += len(self._waiting)

    def add(self, step: Step, finish: Callable[[], LaunchedStep]) -> DeferredStep:
        """Adds a step whose layers have been launched.

        Args:
            step: The step.
            finish: Launches the rest.
        """
        deferred = DeferredStep(finish)
        self._waiting.append((deferred, step.rows[step.samples > 0]))
        return deferred

    def finish(self) -> None:
        """Finishes all."""
        for each, _ in self._waiting:
            each.finish()
        self._waiting.clear()


# A step that was queued on the device, and its results.


class LaunchedStep:
    """Implements :class:`sapwood_worker.records.step.LaunchedStep`; copies results to the host from construction on.

    Args:
        step: The step.
        at: The positions that it samples.
        tokens: Their tokens; None if there are none.
        prompts: Log probabilities of prompt tokens, by the part's index.
        pooled: float32 [hidden_size] for each chunk to pool, by the part's index.
        copied: Called when the result is taken; returns which copies between tiers have ended.
        ops: The operations of the results' device.
        spared_tokens: As :class:`ModelOutput` has them.
        seen: int64 [1]: the same field of :class:`ModelOutput`; None: 0.
        scored: float32 [K]: the same; None: there are none.
    """

    def __init__(
        self,
        step: Step,
        at: Positions | None,
        tokens: SampledTokens | None,
        prompts: Mapping[int, Logprobs],
        copied: Callable[[], CopyReport],
        ops: DeviceOps,
        pooled: Mapping[int, Tensor] | None = None,
        spared_tokens: int = 0,
        seen: Tensor | None = None,
        scored: Tensor | None = None,
    ) -> None:
        self._has_scores = scored is not None
        self._spared_tokens = spared_tokens
        self._has_seen = seen is not None
        self._step = step.number
        self._count = len(step.rows) + len(step.joins)
        self._at = at
        self._late = step.late
        self._tokens = tokens
        self._prompts = prompts
        self._copied = copied
        tensors: list[Tensor] = []
        if tokens is not None:
            tensors = [tokens.tokens, *(tokens.logprobs.tensors if tokens.logprobs is not None else ())]
        for each in prompts.values():
            tensors += each.tensors
        self._pooled = tuple(pooled or ())
        tensors += (pooled or {}).values()
        if seen is not None:
            tensors.append(seen)
        if scored is not None:
            tensors.append(scored)
        self._copies = ops.to_host(tensors)

    def check(self) -> None:
        self._copies.check()

    def result(self) -> ModelOutput:
        """May be called once."""
        tensors = iter(self._copies.wait())
        token_ids: list[list[int]] = [[] for _ in range(self._count)]
        logprobs: dict[int, list[TokenLogprobs]] = {}
        if self._tokens is not None and self._at is not None:
            values: list[int] = next(tensors).tolist()
            parts = _parts(values, self._at, self._late)
            if self._at.drafts is None:
                for part, token in zip(parts, values, strict=True):
                    token_ids[part] = [token]
            else:
                for part, token in zip(parts, values, strict=True):
                    if part >= 0:
                        token_ids[part].append(token)
            if self._tokens.logprobs is not None:
                found = Logprobs(next(tensors), next(tensors), next(tensors)).to_list(self._tokens.alternatives)
                for row, each in zip(self._tokens.rows, found, strict=True):
                    if parts[row] >= 0 and values[row] >= 0:
                        logprobs.setdefault(parts[row], []).append(each)
        prompts = {index: Logprobs(next(tensors), next(tensors), next(tensors)).to_list() for index in self._prompts}
        pooled = {index: next(tensors).numpy() for index in self._pooled}
        failures = {} if self._tokens is None else dict(self._tokens.failures)
        seen = int(next(tensors)) if self._has_seen else 0
        scored = next(tensors).tolist() if self._has_scores else []
        copied = self._copied()
        return ModelOutput(
            self._step, token_ids, copied, logprobs, prompts, pooled, failures, self._spared_tokens, seen, (), scored
        )


def _parts(values: list[int], at: Positions, late: LateTokens | None) -> Sequence[int]:
    """The part of each position; -1 for positions after the first one of their part whose token differs from the draft."""
    drafts = at.drafts
    if drafts is None:
        return at.parts
    drafted = drafts.tokens if late is None else settled(drafts.tokens, late)
    parts: list[int] = []
    counts = True
    rows = zip(values, drafts.owner.tolist(), drafts.offsets.tolist(), drafted.tolist(), strict=True)
    for token, owner, offset, guess in rows:
        counts = counts or offset == 0
        parts.append(at.parts[owner] if counts else -1)
        counts = counts and token == guess
    return parts
