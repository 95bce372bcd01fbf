"""Puts a runner together: the model, its pools and attention, its graphs, and the memory for them."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sapwood_common.errors import ConfigError
from sapwood_common.grammar.vocabulary import load_vocabulary
from sapwood_common.plugins import part_names
from sapwood_kernels.ops.factory import cache_folder, device_ops
from sapwood_kernels.sampling.cpu_sampling import SETTINGS
from sapwood_worker.model.attention.paged import PagedAttention
from sapwood_worker.model.checkpoint.generation_config import read_sampling_defaults
from sapwood_worker.model.checkpoint.sentence_config import SentenceConfig, read_sentence_config
from sapwood_worker.model.compiled_kernels import begin_kernels
from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.distributed.pipeline import MicroBatches, measured
from sapwood_worker.model.heads.eagle import load_eagle
from sapwood_worker.model.heads.head import Head, ShiftedSteps
from sapwood_worker.model.heads.mtp import load_mtp
from sapwood_worker.model.layers.aux_hidden_states import AuxiliaryHiddenStates
from sapwood_worker.model.live_weights import LiveWeights
from sapwood_worker.model.loader import LoadedModel, load_model
from sapwood_worker.model.lora.store import LoraStore
from sapwood_worker.model.pools.device_pool import DevicePool, KVScales
from sapwood_worker.model.pools.host_pool import memory_limit
from sapwood_worker.model.pools.page_copier import PageCopier
from sapwood_worker.model.pools.torch_transfer import make_transfer
from sapwood_worker.model.runner.ahead_of_time import AheadOfTimeKernels
from sapwood_worker.model.runner.attention_builder import AttentionBuilder
from sapwood_worker.model.runner.drafting_runner import DraftingRunner, drafted_before, try_checks
from sapwood_worker.model.runner.graphs.recorded_steps import record_steps
from sapwood_worker.model.runner.identity import assure_equal, cache_identity
from sapwood_worker.model.runner.kv_calibration import kv_scales
from sapwood_worker.model.runner.memory import (
    SCRATCH_PAGES,
    PoolBuilder,
    build_host_pool,
    compute_shared_trial,
    compute_trial,
    plan_prompts,
)
from sapwood_worker.model.runner.model_runner import ModelRunner
from sapwood_worker.model.runner.options import DTYPES, RunnerOptions
from sapwood_worker.model.runner.overlap_trial import overlap_sums, try_micro_batches
from sapwood_worker.model.runner.pictures import PictureEncoder
from sapwood_worker.model.runner.pooling import Pooler
from sapwood_worker.model.sampling.processors import LOGIT_PROCESSORS
from sapwood_worker.model.sampling.token_sampler import TokenSampler
from sapwood_worker.model.sizes import DeviceFacts, Given, ModelFacts, Sizes, choose_sizes
from sapwood_worker.model.vision.loading import UnservedVisionError, load_vision, vision_family
from sapwood_worker.model.vision.tower import Vision
from sapwood_worker.records.kv_layout import KVLayout, StateSlots, WindowGroup
from sapwood_worker.records.model_info import ModelInfo
from sapwood_worker.records.pictures import PictureInfo


def chosen_sizes(
    options: RunnerOptions, config: ModelConfig, layout: KVLayout, device: torch.device, parallel: Parallel
) -> Sizes:
    """The chosen numbers of requests and tokens. The weights are loaded already, so the used GPU memory is known.

    Args:
        options: The given options.
        config: The model's.
        layout: What a page holds on this rank.
        device: This rank's.
        parallel: The groups of ranks.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        facts = DeviceFacts("cuda", total, total - free)
    else:
        facts = DeviceFacts("cpu", memory_limit())
    model = ModelFacts(
        token_bytes=layout.page_bytes / options.page_size,
        state_bytes=layout.state_bytes,
        hidden_size=config.hidden_size,
        intermediate_size=-(-config.intermediate_size // parallel.tp.size),
        context_length=config.max_position,
    )
    given = Given(
        max_running=options.max_running,
        max_step_tokens=options.max_step_tokens,
        cache_tokens=None if options.num_pages is None else options.num_pages * options.page_size,
        cache_bytes=options.kv_cache_bytes,
        memory_fraction=options.memory_fraction,
    )
    # Ranks may find different amounts of memory: all use the choice of the rank with the least.
    sizes = min(parallel.exchange(choose_sizes(facts, model, given), Sizes), key=lambda each: each.least)
    for reason in sizes.reasons:
        logger.info("%s", reason)
    return sizes


if TYPE_CHECKING:
    from sapwood_worker.model.runner.graphs.cuda_graph import DecodeGraphs
    from sapwood_worker.model.runner.graphs.piecewise_graphs import PiecewiseGraphs

logger = logging.getLogger(__name__)
_TRIED_TOKENS = 512
_TRIED_ADAPTERS = (24, 257, 2049)
"""Tokens of trial prompts with an adapter. A GPU has kernels of their own for few, for more than 256 and for more than 2048."""


def build_runner(options: RunnerOptions) -> ModelRunner:
    """Loads the model and everything that it needs to run.

    Raises:
        ConfigError: The model cannot be loaded or the pool is too small; names the file or option.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    return _Builder(options).build()


def build_drafted_runner(options: RunnerOptions, draft: RunnerOptions) -> ModelRunner:
    """Loads the model, and a draft model, which becomes the ``draft`` of the runner that is returned.

    Args:
        options: The model's.
        draft: The draft model's. It gets as many pages and rows as the model, all in one table.

    Raises:
        ConfigError: Either cannot be loaded, or the draft model has another vocabulary.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    builder = _Builder(options)
    beside = _Builder(replace(draft, max_running=builder.max_running, one_table=True))  # before memory is measured
    if beside.vocab_size != builder.vocab_size:
        raise ConfigError(
            f"--speculate draft:{draft.model_path}: its vocabulary has {beside.vocab_size} tokens, the model's has "
            f"{builder.vocab_size}: a draft model must have the model's own"
        )
    runner = builder.build(beside.page_bytes)
    runner.draft = beside.build(num_pages=runner.info.num_pages, drafts=True)
    return drafted_before(runner, 0)


def build_headed_runner(options: RunnerOptions, folder: Path | None) -> ModelRunner:
    """Loads the model, and a head that drafts from its hidden states, which becomes the ``draft`` of the runner that is returned.

    Args:
        options: The model's.
        folder: The head's, in EAGLE-3's format; None: the head is that of the model's own checkpoint, for multi-token prediction.

    Raises:
        ConfigError: Either cannot be loaded, or the head is not for this model.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    return drafted_before(_Builder(replace(options, headed=True)).build_headed(folder), 1)


class _Builder:
    """Loads a model, and makes its parts: for a trial step that measures memory, and for good."""

    def __init__(self, options: RunnerOptions) -> None:
        self._options = options
        self._ops = device_ops(options.device, fixed_order=options.deterministic)
        self._ops.tune_experts(options.expert_tuning, cache_folder() / "experts")
        self._device = self._ops.device
        self._ahead = AheadOfTimeKernels.begin(options, self._ops)
        self._dtype_name = self._ops.default_dtype if options.dtype == "auto" else options.dtype
        self._dtype = DTYPES[self._dtype_name]
        float8 = options.kv_cache_dtype == "fp8_e4m3"
        compiling = begin_kernels(
            options.model_path, options.attention_backend, options.page_size, self._dtype, self._ops, float8=float8
        )
        loaded = load_model(
            options.model_path,
            options.load_format,
            self._dtype,
            self._ops,
            context_length=options.context_length,
            threads=options.threads or torch.get_num_threads(),
            seed=options.seed,
            quantization=options.quantization,
            parallel=options.parallel,
            stored_weights=options.stored_weights,
            adapted=options.lora_slots > 0,
        )
        self._head: Head | None = None
        self._picture_info: PictureInfo | None = None
        self._parallel = options.parallel
        self._tp = options.parallel.tp
        if options.parallel.rows is not None:
            options.parallel.rows.forget()
        assure_equal(options)
        self._config = loaded.config
        self._model = loaded.model
        self._eos_token_ids = loaded.eos_token_ids
        self._headless = loaded.headless
        self._family = loaded.family
        self._quantization = loaded.quantization
        if options.deterministic and loaded.quantization != "none":
            raise ConfigError(
                f"--deterministic: products with weights in {loaded.quantization} depend on the batch; --stored-weights widen "
                "reads them in the model's dtype"
            )
        self._loras = None if not options.lora_slots else self._build_loras(loaded)
        self._pictures = self._build_pictures()
        self._weights = self._dtype_name if loaded.quantization == "none" else loaded.quantization
        self._weights += ", output head int8" * loaded.rounds_head
        logger.info("linear layers: %s", self._weights)
        kept = "float8_e4m3fn" if float8 else self._dtype_name
        self._whole = loaded.family.kv_layout(self._config, kept, options.page_size)
        layout = self._whole.stage(self._model.own).shard(self._parallel.attending.tp.size)
        self._layout = layout.kept_whole() if options.one_table else layout
        self._sizes = chosen_sizes(options, self._config, self._layout, self._device, self._parallel)
        running = self._sizes.max_running
        self._largest_graph = min(options.cuda_graph_max_batch or running, running)
        # The latest token of the request in each row of the page table.
        self._last_tokens = torch.zeros(running, dtype=torch.int64, device=self._device)
        self._drawing = torch.zeros(running, SETTINGS, dtype=torch.int64, device=self._device)
        self._scales: KVScales | None = None
        if float8:
            own = kv_scales(loaded.kv_scales, self._model, self._config, self._layout, self._dtype, self._device)
            self._scales = KVScales.largest(self._parallel.exchange(own, KVScales))
        self._pools = PoolBuilder(options, self._layout, self._sizes, self._device, self._scales, self._parallel)
        cached = self._dtype if self._scales is None else torch.float8_e4m3fn
        beside = None if options.kernels_wait else compiling
        self._attention = AttentionBuilder(
            options, self._model, self._config, self._layout, self._dtype, cached, self._ops, beside
        )
        most = self._sizes.max_step_tokens
        overlap_sums(self._parallel, self._model, self._ops, self._dtype, most, captured=self._captured)
        if compiling is not None and self._attention.waits:
            compiling.wait(logger.info)

    def _build_pictures(self) -> PictureEncoder | None:
        """The vision part, before the memory that is left is measured; None: the model has none that is served."""
        options = self._options
        family = vision_family(options.model_path) if options.pictures else None
        if family is None:
            return None
        if self._parallel.pp.size > 1 or self._parallel.rows is not None:
            logger.warning("pictures are refused: pipelines and data-parallel attention take none")
            return None
        dummy = options.seed if options.load_format == "dummy" else None
        try:
            vision = load_vision(options.model_path, family, self._dtype, self._device, dummy)
        except UnservedVisionError as error:
            logger.warning("pictures are refused: %s", error)
            return None
        if type(vision).positions is not Vision.positions and not all(
            rope is not None and rope.sections for rope in self._config.ropes
        ):
            logger.warning("pictures are refused: mrope_section is missing in config.json or does not fit a head")
            return None
        if vision.whole and self._device.type != "cpu":
            logger.warning("pictures are refused: attention among all tokens of a picture runs on a CPU only")
            return None
        self._picture_info = PictureInfo(family.name, vision.tokens, vision.whole, options.most_picture_bytes)
        return PictureEncoder(vision, self._ops, options.picture_cache_bytes, options.picture_host_bytes)

    def _build_loras(self, loaded: LoadedModel) -> LoraStore:
        """The slots for adapters, before the memory that is left is measured."""
        options = self._options
        try:
            return LoraStore(
                loaded.model, loaded.family, self._ops, self._dtype, slots=options.lora_slots, rank=options.lora_rank,
                parallel=options.parallel,
            )  # fmt: skip
        except torch.OutOfMemoryError:
            raise ConfigError(
                f"--lora-slots {options.lora_slots},rank={options.lora_rank}: there is no memory for so many: give less"
            ) from None

    @property
    def max_running(self) -> int:
        """Most requests in a step."""
        return self._sizes.max_running

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        return self._config.vocab_size

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of all layers."""
        return self._layout.page_bytes

    def build(self, beside: int = 0, num_pages: int | None = None, *, drafts: bool = False) -> ModelRunner:
        """Makes the parts for good; called once.

        Args:
            beside: Bytes that another model keeps for each page, in the same memory.
            num_pages: Pages of the pool; None: as the options say.
            drafts: Whether it drafts for another model.
        """
        options, config = self._options, self._config
        if self._ahead is not None:
            self._ahead.compile(self._rehearse, self._tp)
        self._tp.exchange("", str)  # the kernels that one rank compiles for its host are ready
        counts = self._pools.page_counts(num_pages or options.num_pages, beside, self._try_largest_step)
        pool = self._pools.build(counts.pages, counts.snapshots)
        # Pages that no layer keeps anything in are many.
        windows = pool.counts[1:] if not self._whole.group_bytes(0) else ()
        num_pages = max(windows, default=pool.num_pages) - SCRATCH_PAGES
        host_pool = build_host_pool(options, pool.layout, self._whole, num_pages, self._parallel)
        if (head := self._head) is not None:
            shape = pool.num_pages * pool.page_size, head.config.hidden_size
            head.store = torch.zeros(shape, dtype=self._dtype, device=self._device)
            self._model.aux_hidden_states = AuxiliaryHiddenStates(head.taken, head.mix, head.store)
        copier = PageCopier(pool, self._ops, () if head is None else (head.store,))
        backend, graphs = self._attention.backend(
            pool, self._last_tokens, self._drawing, self._largest_graph, whole_ladder=True, loras=self._loras
        )
        # Some libraries compile kernels at their first use, for minutes: they are compiled here, before requests come.
        if self._ops.asynchronous:
            copier.warm_up()
            compute_trial([1, 2], self._model, pool, backend, self._ops)
            compute_shared_trial(config.max_position, self._model, pool, backend, self._ops)
            self._try_adapters(pool, backend, graphs)
        length = min(config.max_position, (pool.num_pages - SCRATCH_PAGES) * pool.page_size)
        if self._tp.size == self._parallel.pp.size == 1:  # a layer alone is no step that ranks could take together
            self._plan_prompts(min(config.max_position, self._sizes.max_step_tokens), pool, backend)
        sentences = read_sentence_config(options.model_path, "last", length)
        pooler = Pooler(sentences.dense, config.hidden_size, self._device, whole=False)
        runner = (DraftingRunner if drafts else ModelRunner)(
            info=self._info(config, pool, length, sentences),
            pooler=pooler,
            ops=self._ops,
            model=self._model,
            pool=pool,
            backend=backend,
            graphs=graphs,
            pieces=self._build_pieces(backend, pool, whole_ladder=True),
            sampler=self._sampler(self._drawing),
            last_tokens=self._last_tokens,
            vocabulary=load_vocabulary(options.model_path) if options.structured_output else None,
            host_pool=host_pool,
            transfer=None if host_pool is None else make_transfer(pool, host_pool, self._ops),
            copier=copier,
            identity=self._identity,
            cuts=self._micro_batches(pool, backend),
            parallel=self._parallel,
            recorded=record_steps(options, self._model, self._ops, self._dtype),
            loras=self._loras,
            pictures=self._pictures,
        )
        if not drafts:
            runner.weights = LiveWeights(
                self._model,
                self._family,
                self._parallel,
                threads=options.threads or torch.get_num_threads(),
                captures=self._ops.captures,
                device=self._device,
                exchanged=lambda: None if runner.recorded is None else runner.recorded.forget(),
            )
        if self._ops.asynchronous and config.labels is None and self._parallel.rows is None:
            if self._parallel.pp.size == 1:
                try_checks(runner)
            try_micro_batches(runner, pool, self._parallel, always=options.micro_batches == "always")
        self._model.forget_expert_tokens()
        if self._ahead is not None:
            self._ahead.remember()
        return runner

    def build_headed(self, folder: Path | None) -> ModelRunner:
        """The model's runner, with that of a head that drafts."""
        page_size, split = self._options.page_size, self._tp.size > 1
        head: Head
        if folder is None:
            threads = self._options.threads or torch.get_num_threads()
            head = load_mtp(self._options.model_path, self._model, self._dtype, self._ops, threads, split=split)
        else:
            head = load_eagle(folder, self._model, self._dtype, self._ops, self._options.model_path, split=split)
        self._head, config = head, head.config
        layout = head.layout(self._dtype_name, page_size)
        features = page_size * config.hidden_size * torch.finfo(self._dtype).bits // 8
        runner = self.build(layout.page_bytes + features)
        pool = DevicePool(layout, [runner.info.num_pages + SCRATCH_PAGES], self._device, None)
        # One layer's prompts are not worth waiting for FlashInfer's compilers.
        kernels = "triton" if self._ops.captures and self._dtype != torch.float32 else "auto"
        own = replace(self._options, attention_backend=kernels, shared_prefix_attention=False, parallel=Parallel())
        attention = AttentionBuilder(own, head, config, layout, self._dtype, self._dtype, self._ops)
        last_tokens = torch.zeros_like(self._last_tokens)
        shifted = ShiftedSteps(head.store, page_size, pool.scratch_slots()[0])
        backend, graphs = attention.backend(
            pool, last_tokens, None, self._largest_graph, whole_ladder=True, shifted=shifted
        )
        runner.draft = DraftingRunner(
            info=runner.info,
            ops=self._ops,
            model=head,
            pool=pool,
            backend=backend,
            graphs=graphs,
            pieces=None,
            sampler=self._sampler(None),
            last_tokens=last_tokens,
            vocabulary=None,
            host_pool=None,
            transfer=None,
            copier=PageCopier(pool, self._ops),
            identity=self._identity,
            shifted=shifted,
        )
        return runner

    @torch.inference_mode()
    def _try_adapters(self, pool: DevicePool, backend: PagedAttention, graphs: DecodeGraphs | None) -> None:
        """Computes prompts with an adapter for every linear layer, and captures decodes, so that kernels are compiled.

        Args:
            pool: Whose pages are written.
            backend: The model's attention.
            graphs: What captures; None: a decode is computed as if it were captured.
        """
        if (loras := self._loras) is None:
            return
        loras.touch(None)
        for count in _TRIED_ADAPTERS:
            if count <= min(
                self._sizes.max_step_tokens, self._config.max_position, (min(pool.counts) - 1) * pool.page_size
            ):
                with loras.computing(np.zeros(count, np.int64)):
                    compute_trial([count], self._model, pool, backend, self._ops)
        if graphs is not None:
            graphs.capture_adapted()
        else:
            with loras.capturing(loras.graph_rows(_TRIED_ADAPTERS[0])):
                compute_trial([_TRIED_ADAPTERS[0]], self._model, pool, backend, self._ops)
        loras.touch(frozenset())
        loras.batch.applied = 0

    def _sampler(self, drawing: Tensor | None) -> TokenSampler:
        running = self._sizes.max_running
        return TokenSampler(running, self._config.vocab_size, self._eos_token_ids, self._ops, drawing)

    def _info(self, config: ModelConfig, pool: DevicePool, length: int, sentences: SentenceConfig) -> ModelInfo:
        size = sentences.dense[-1].outputs if sentences.dense else config.hidden_size
        return ModelInfo(
            architecture=config.architecture,
            dtype=self._dtype_name,
            context_length=length,
            vocab_size=config.vocab_size,
            eos_token_ids=self._eos_token_ids,
            page_size=pool.page_size,
            num_pages=pool.num_pages - SCRATCH_PAGES,
            embedding_size=size if config.labels is None else 0,
            pooling=sentences.pooling if config.labels is None else "labels",
            normalizes=sentences.normalizes and config.labels is None,
            labels=config.labels,
            generates=config.labels is None and not self._headless,
            sampling_defaults=self._sampling_defaults(),
            embedded_tokens=sentences.max_tokens,
            shortened=sentences.shortened,
            prefill_attention=self._attention.prefill.name,
            decode_attention=self._attention.decode.name,
            expert_tiles=self._ops.tuning.source if config.sparse is not None and self._ops.groups_experts else "",
            expert_tile_sizes=self._ops.tuning.sizes,
            expert_exchange=config.expert_exchange(self._parallel.ep.size, self._dtype.itemsize),
            attention_reason=self._attention.reason,
            special_ids=sentences.special_ids,
            weights=self._weights,
            windows=tuple(
                WindowGroup(self._layout.reach(group), count - SCRATCH_PAGES)
                for group, count in enumerate(pool.counts)
                if group
            ),
            states=None if pool.states is None else StateSlots(pool.states.snapshots, self._layout.state_bytes),
            tensor_parallel=self._tp.size,
            attention_ranks=1 if self._parallel.rows is None else self._tp.size,
            pipeline_parallel=self._parallel.pp.size,
            all_reduce=self._tp.report,
            micro_batches=1 if self._options.micro_batches == "off" else self._parallel.pp.size,
            chained=self._ops.asynchronous,
            logit_processors=part_names(LOGIT_PROCESSORS, {}) if config.labels is None else (),
            max_running=self._sizes.max_running,
            max_step_tokens=self._sizes.max_step_tokens,
            sizes_reason="; ".join(self._sizes.reasons),
            pictures=self._picture_info,
            lora_slots=self._options.lora_slots,
            max_lora_rank=self._options.lora_rank if self._options.lora_slots else 0,
        )

    def _sampling_defaults(self) -> dict[str, float]:
        if self._options.sampling_defaults == "none":
            return {}
        found = read_sampling_defaults(self._options.model_path)
        if found:
            logger.info("sampling, unless requests say otherwise: %s (of the model's files)", found)
        return found

    def _plan_prompts(self, most: int, pool: DevicePool, backend: PagedAttention) -> None:
        began, room = time.monotonic(), (min(pool.counts) - SCRATCH_PAGES) * pool.page_size
        found = plan_prompts(min(most, room), self._model, pool, backend, self._ops)
        if found:
            took = time.monotonic() - began
            logger.info("attention: %d lengths of prompts up to %d planned in %.1f s", len(found), found[-1], took)

    def _build_pieces(self, backend: PagedAttention, pool: DevicePool, *, whole_ladder: bool) -> PiecewiseGraphs | None:
        if self._options.headed:  # the pieces run layer by layer, past the aux_hidden_states
            return None
        float8, most = self._quantization != "none", self._sizes.max_step_tokens
        return self._attention.pieces(backend, pool, most, float8=float8, whole_ladder=whole_ladder)

    @property
    def _captured(self) -> int:
        """Tokens of the largest step of prompts that has graphs; 0: none has."""
        if self._options.headed:
            return 0
        return self._attention.most_captured(self._sizes.max_step_tokens, float8=self._quantization != "none")

    def _identity(self) -> str:
        computed = self._dtype_name if self._quantization == "none" else f"{self._dtype_name}-{self._quantization}"
        return cache_identity(self._options, computed, self._whole, self._scales, self._model.config.rotary_variants)

    @torch.inference_mode()
    def _rehearse(self) -> None:
        """Runs the steps that graphs will capture, and prompts, without a graph."""
        prompts, pool = self._pools.trial(self._config.max_position)
        backend, _ = self._attention.backend(
            pool, self._last_tokens, self._drawing, self._largest_graph, whole_ladder=True, capture=False
        )
        for lengths in ([1, 2], prompts):
            compute_trial(lengths, self._model, pool, backend, self._ops)
        compute_shared_trial(self._config.max_position, self._model, pool, backend, self._ops)
        self._try_adapters(pool, backend, None)

    @torch.inference_mode()
    def _try_largest_step(self) -> int:
        """Computes a step with the most tokens and samples beside the largest decode graph; returns the bytes of its pool."""
        prompts, pool = self._pools.trial(self._config.max_position)
        backend, graphs = self._attention.backend(
            pool, self._last_tokens, self._drawing, self._largest_graph, whole_ladder=False
        )
        pieces = self._build_pieces(backend, pool, whole_ladder=False)
        hidden = compute_trial(prompts, self._model, pool, backend, self._ops)
        rows = hidden.index_select(0, torch.zeros(self._sizes.max_running, dtype=torch.int64, device=self._device))
        self._model.logits(rows).float().softmax(-1)
        torch.cuda.synchronize(self._device)
        del graphs, pieces
        return pool.num_bytes

    @torch.inference_mode()
    def _micro_batches(self, pool: DevicePool, backend: PagedAttention) -> MicroBatches | None:
        """How steps are cut for the stages of a pipeline, by measured steps of few and of many tokens; None: there is one
        stage."""
        if self._parallel.pp.size == 1:
            return None
        room = (min(pool.counts) - SCRATCH_PAGES) * pool.page_size
        most = min(_TRIED_TOKENS, self._sizes.max_step_tokens, self._config.max_position, room)
        cuts = measured(self._parallel, lambda n: compute_trial([n], self._model, pool, backend, self._ops).cpu(), most)
        own, step = self._model.own, self._sizes.max_step_tokens
        said = f"layers {own.start} to {own.stop - 1} of {self._config.num_layers} are here; {cuts.reason}"
        logger.info("pipeline: %s: a step of %d tokens is cut in %d", said, step, cuts.count(step))
        return cuts
