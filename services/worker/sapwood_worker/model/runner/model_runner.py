"""Runs a loaded model on scheduler steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.errors import ConfigError
from sapwood_common.grammar.vocabulary import TokenVocabulary, load_vocabulary
from sapwood_kernels.device_copy import to_device
from sapwood_worker.model.attention.backend import AttentionBackend
from sapwood_worker.model.attention.torch_native import TorchNativeBackend
from sapwood_worker.model.checkpoint.fingerprint import model_fingerprint
from sapwood_worker.model.checkpoint.sentence_config import read_sentence_config
from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.grammar.logit_masks import GrammarMasks, StepMasks
from sapwood_worker.model.layers.linear import Quantization
from sapwood_worker.model.loader import LoadFormat, load_model
from sapwood_worker.model.pools.device_pool import DevicePool, KVScales, page_bytes
from sapwood_worker.model.pools.host_pool import HostPool, host_pool_pages
from sapwood_worker.model.pools.torch_transfer import make_transfer
from sapwood_worker.model.pools.transfer import Transfer
from sapwood_worker.model.runner.decode_rows import DecodeRows, decode_rows
from sapwood_worker.model.runner.forward_batch import ForwardBatch
from sapwood_worker.model.runner.input_builder import build_forward_batch
from sapwood_worker.model.runner.kv_calibration import calibrate
from sapwood_worker.model.runner.launched_step import LaunchedStep
from sapwood_worker.model.runner.memory_profile import measure_pool_bytes
from sapwood_worker.model.runner.pooling import pool_chunk
from sapwood_worker.model.sampling.logprobs import Distribution, Logprobs, join
from sapwood_worker.model.sampling.token_sampler import SampledTokens, TokenSampler
from sapwood_worker.records.model_info import ModelInfo
from sapwood_worker.records.page_copies import NOTHING, CopyReport
from sapwood_worker.records.step import ModelOutput, ScheduledRequest, SchedulerOutput

if TYPE_CHECKING:
    from sapwood_worker.model.runner.cuda_graph import DecodeGraphs
    from sapwood_worker.model.runner.piecewise_graphs import PiecewiseGraphs

# Pages beyond those that the scheduler knows of, to which padding rows write.
_SCRATCH_PAGES = 1
# Prompt tokens whose logits are computed at once for log probabilities; more would take more memory.
_LOGPROB_ROWS = 256
_DEFAULT_BYTES = 1 << 30
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """What to run and with what memory.

    Attributes:
        model_path: A ``.gguf`` file or a Hugging Face directory.
        load_format: ``dummy`` reads the configuration only and makes weights up.
        device: A torch device.
        dtype: The dtype of weights, activations and cache; ``auto`` is float32 on a CPU, else bfloat16.
        page_size: Tokens in a page.
        num_pages: Pages in the pool; None: as many as fit in ``kv_cache_bytes``.
        kv_cache_bytes: Bytes of the pool, unless ``num_pages`` is given; None: on CUDA what is left of ``memory_fraction``
            after a trial of the largest step, elsewhere 1 GiB.
        quantization: How linear layers are quantised: ``fp8`` has scales for each token and output channel, ``fp8_block`` for
            128 numbers of a token and 128 x 128 of the weight, ``fp8_tensor`` one for each tensor.
        kv_cache_dtype: The pool's dtype: ``auto`` is the model's.
        memory_fraction: Largest share of the GPU's memory that may be in use, other programs' included.
        max_step_tokens: Most tokens in a step, and the tokens of the trial.
        context_length: Upper limit of prompt and output together; None: the model's own.
        max_running: Most requests in a step; the pool must have a page for each.
        threads: CPU threads of torch and of loading; None: torch's own choice. Set for the whole process.
        seed: Seed of made-up weights.
        structured_output: Whether the vocabulary is read for requests with a grammar.
        host_cache_gb: Memory of the KV cache's second tier in GiB; 0: the ratio decides.
        host_cache_ratio: Pages of that tier for each page of the pool; 0: the memory decides. Both 0: there is none.
    """

    model_path: Path
    load_format: LoadFormat = "auto"
    device: str = "cpu"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    page_size: int = 16
    num_pages: int | None = None
    kv_cache_bytes: int | None = None
    quantization: Quantization = "none"
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] = "auto"
    memory_fraction: float = 0.9
    max_step_tokens: int = 8192
    context_length: int | None = None
    max_running: int = 64
    threads: int | None = None
    seed: int = 0
    structured_output: bool = False
    host_cache_gb: float = 0.0
    host_cache_ratio: float = 0.0


class ModelRunner:
    """Implements :class:`sapwood_worker.records.step.Runner`.

    Args:
        options: What to run.

    Attributes:
        info: Facts about the model and its page pool.
        vocabulary: The model's tokens, where its files hold them and structured output is wanted.
        host_pool: The memory of the KV cache's second tier; None: there is none.

    Raises:
        ConfigError: The model cannot be loaded or the pool is too small; names the file or option.
    """

    def __init__(self, options: RunnerOptions) -> None:
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        self._device = torch.device(options.device)
        self.asynchronous = self._device.type == "cuda"
        default = "float32" if self._device.type == "cpu" else "bfloat16"
        name = default if options.dtype == "auto" else options.dtype
        dtype = _DTYPES[name]
        loaded = load_model(
            options.model_path,
            options.load_format,
            dtype,
            self._device,
            context_length=options.context_length,
            threads=options.threads or torch.get_num_threads(),
            seed=options.seed,
            quantization=options.quantization,
        )
        config = loaded.config
        self._options = options
        self._model = loaded.model
        self._dtype = dtype
        # The latest token of the request in each row of the page table.
        self._last_tokens = torch.zeros(options.max_running, dtype=torch.int64, device=self._device)
        self._scales: KVScales | None = None
        if options.kv_cache_dtype == "fp8_e4m3":
            self._scales = calibrate(self._model, config, dtype, self._device)
        self._pool = self._build_pool(config, self._num_pages(config))
        self.host_pool = _build_host_pool(options, self._pool)
        self._transfer: Transfer | None = None if self.host_pool is None else make_transfer(self._pool, self.host_pool)
        self._backend, self._graphs = self._build_backend(config, self._pool, None)
        self._pieces = self._build_pieces(self._backend, self._pool, whole_ladder=True)
        self.vocabulary: TokenVocabulary | None = (
            load_vocabulary(options.model_path) if options.structured_output else None
        )
        self._masks = GrammarMasks(config.vocab_size)
        self._sampler = TokenSampler(options.max_running, config.vocab_size, loaded.eos_token_ids, self._device)
        length = min(config.max_position, (self._pool.num_pages - _SCRATCH_PAGES) * self._pool.page_size)
        sentences = read_sentence_config(options.model_path, "last", length)
        self.info = ModelInfo(
            architecture=config.architecture,
            dtype=name,
            context_length=length,
            vocab_size=config.vocab_size,
            eos_token_ids=loaded.eos_token_ids,
            page_size=self._pool.page_size,
            num_pages=self._pool.num_pages - _SCRATCH_PAGES,
            embedding_size=config.hidden_size,
            pooling=sentences.pooling,
            normalizes=sentences.normalizes,
            embedded_tokens=sentences.max_tokens,
            shortened=sentences.shortened,
            special_ids=sentences.special_ids,
        )

    @torch.inference_mode()
    def _build_backend(
        self, config: ModelConfig, pool: DevicePool, sizes: Sequence[int] | None
    ) -> tuple[AttentionBackend, DecodeGraphs | None]:
        """The attention backend, and the graphs of decode steps where there are any, of the given sizes (None: all)."""
        dtype = self._dtype
        if self._device.type != "cuda" or dtype == torch.float32:
            return TorchNativeBackend(pool, dtype), None
        # Imported here, since only the extra [gpu] installs the package.
        from sapwood_kernels.flashinfer_attention import AttentionShape, Variant
        from sapwood_worker.model.attention.flashinfer import FlashInferBackend
        from sapwood_worker.model.runner.cuda_graph import DecodeGraphs, ladder

        shape = AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, pool.page_size, dtype)
        kinds = [Variant(config.attention_scale, window, config.attention_softcap) for window in config.windows]
        backend = FlashInferBackend(pool, shape, tuple(dict.fromkeys(kinds)), config.max_position)
        sizes = ladder(self._options.max_running) if sizes is None else sizes
        scratch = pool.num_pages - _SCRATCH_PAGES
        return backend, DecodeGraphs(self._model, backend, pool, sizes, scratch, self._last_tokens)

    @torch.inference_mode()
    def _build_pieces(
        self, backend: AttentionBackend, pool: DevicePool, *, whole_ladder: bool
    ) -> PiecewiseGraphs | None:
        """The graphs of steps that compute prompts, where there are any, of all sizes or of the largest only."""
        if self._device.type != "cuda" or self._dtype == torch.float32:
            return None
        from sapwood_worker.model.attention.flashinfer import FlashInferBackend
        from sapwood_worker.model.runner.piecewise_graphs import PiecewiseGraphs, token_ladder, worth_capturing

        assert isinstance(backend, FlashInferBackend)
        parameters = sum(each.numel() for each in self._model.layers.parameters())
        worth = worth_capturing(parameters, float8=self._options.quantization != "none")
        largest = min(worth, self._options.max_step_tokens)
        sizes = token_ladder(largest) if whole_ladder else [largest]
        return PiecewiseGraphs(self._model, backend, pool, sizes, pool.num_pages - _SCRATCH_PAGES)

    def _build_pool(self, config: ModelConfig, pages: int) -> DevicePool:
        options = self._options
        if pages < options.max_running:
            raise ConfigError(
                f"the KV cache holds {pages} pages of {options.page_size} tokens, fewer than the {options.max_running} "
                "requests that may run: give it more memory or lower --max-running"
            )
        return DevicePool(
            num_layers=config.num_layers,
            num_pages=pages + _SCRATCH_PAGES,
            page_size=options.page_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=self._dtype if self._scales is None else torch.float8_e4m3fn,
            device=self._device,
            scales=self._scales,
        )

    def _num_pages(self, config: ModelConfig) -> int:
        options = self._options
        if options.num_pages is not None:
            return options.num_pages
        size = page_bytes(
            num_layers=config.num_layers,
            page_size=options.page_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=self._dtype if self._scales is None else torch.float8_e4m3fn,
        )
        if options.kv_cache_bytes is not None:
            return options.kv_cache_bytes // size
        if self._device.type != "cuda":
            return _DEFAULT_BYTES // size
        trial = partial(self._try_largest_step, config, size)
        return measure_pool_bytes(self._device, options.memory_fraction, trial) // size

    @torch.inference_mode()
    def _try_largest_step(self, config: ModelConfig, size: int) -> int:
        """Computes a step with the most tokens and samples beside the largest decode graph, in a trial pool.

        Returns the bytes of that pool, whose pages have ``size`` bytes. Libraries also load here what a first request needs.
        """
        options = self._options
        longest = config.max_position
        prompts = [min(longest, options.max_step_tokens)]
        while sum(prompts) < options.max_step_tokens and len(prompts) < options.max_running:
            prompts.append(min(longest, options.max_step_tokens - sum(prompts)))
        needed = [-(-length // options.page_size) for length in prompts]
        pool = self._build_pool(config, max(sum(needed), options.max_running))
        backend, graphs = self._build_backend(config, pool, [options.max_running])
        pieces = self._build_pieces(backend, pool, whole_ladder=False)
        table = np.zeros((len(prompts), max(needed)), np.int32)
        table[np.arange(max(needed)) < np.array(needed)[:, None]] = np.arange(sum(needed))
        requests = [
            ScheduledRequest(str(slot), slot, [0] * length, 0, True, SamplingParams())
            for slot, length in enumerate(prompts)
        ]
        batch = build_forward_batch(SchedulerOutput(0, table, requests), options.page_size, self._device)
        hidden: Tensor = self._model(batch.token_ids, batch.positions, backend.plan(batch.attention))
        rows = hidden.index_select(0, torch.zeros(options.max_running, dtype=torch.int64, device=self._device))
        self._model.logits(rows).float().softmax(-1)
        torch.cuda.synchronize(self._device)
        del graphs, pieces
        return pool.num_pages * size

    def execute(self, output: SchedulerOutput) -> ModelOutput:
        return self.launch(output).result()

    @torch.inference_mode()
    def launch(self, output: SchedulerOutput) -> LaunchedStep:
        requests = output.requests
        if output.copies is not None:
            assert self._transfer is not None, "there is no second tier to copy to"
            self._transfer.start(output.copies)
        if not requests:
            return LaunchedStep(output, (), None, {}, self._copied)
        graphs = self._graphs
        if graphs is not None:
            # A graph waits for all layers' loaded pages, other steps layer by layer.
            loads = output.copies is not None and output.copies.load is not None
            rows = decode_rows(requests, self._pool.page_size, graphs.largest, graphs.most_pages, prompts=not loads)
            if rows is not None:
                sampling = [requests[i] for i in rows.sampled]
                with self._masks.start(sampling) as masks:
                    replayed = self._replay(graphs, output, rows, sampling, masks)
                return LaunchedStep(output, rows.sampled, replayed, {}, self._copied)
        batch = build_forward_batch(output, self._pool.page_size, self._device, self._last_tokens)
        sampled = [i for i, request in enumerate(requests) if request.samples]
        sampling = [requests[i] for i in sampled]
        with self._masks.start(sampling) as masks:
            hidden = self._forward(batch)
            tokens: SampledTokens | None = None
            if sampled:
                last = hidden if batch.logit_rows is None else hidden.index_select(0, batch.logit_rows)
                tokens = self._sampler.sample(self._model.logits(last), sampling, masks)
                self._keep(tokens, to_device(np.array([request.slot for request in sampling]), self._device))
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
        return LaunchedStep(output, sampled, tokens, prompts, self._copied, pooled)

    def cache_identity(self) -> str:
        """What a page's content depends on besides its tokens and the page size: equal only if pages can be exchanged.

        Reads all of the model's files.
        """
        options, pool = self._options, self._pool
        made_up = f"dummy-{options.seed}" if options.load_format == "dummy" else ""
        shape = "x".join(map(str, (len(pool.key_slots), *pool.key_slots[0].shape[1:])))
        stored = f"{pool.dtype}{pool.scales}" if self._scales is not None else ""
        computed = self.info.dtype if options.quantization == "none" else f"{self.info.dtype}-{options.quantization}"
        parts = (model_fingerprint(options.model_path), made_up, computed, stored, shape, self._device.type)
        return "|".join(parts)

    @torch.inference_mode()
    def logits(self, output: SchedulerOutput) -> Tensor:
        """Runs a step like :meth:`execute` but returns the logits after every token, float32 [T, vocab_size]."""
        hidden = self._forward(build_forward_batch(output, self._pool.page_size, self._device))
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
            result = result.select(to_device(rows.last, self._device))
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
        tokens = to_device(np.array(following, np.int64), self._device)
        parts = []
        for start in range(0, len(tokens), _LOGPROB_ROWS):
            chosen = tokens[start : start + _LOGPROB_ROWS]
            logits = self._model.logits(hidden[start : start + len(chosen)]).float()
            parts.append(Distribution(logits, request.prompt_logprobs).of(chosen))
        return join(parts)


def _build_host_pool(options: RunnerOptions, pool: DevicePool) -> HostPool | None:
    keys = pool.key_pages(0)[0]
    size = 2 * len(pool.key_slots) * keys.numel() * keys.element_size()
    pages = host_pool_pages(
        page_bytes=size,
        num_device_pages=pool.num_pages - _SCRATCH_PAGES,
        gigabytes=options.host_cache_gb,
        ratio=options.host_cache_ratio,
    )
    return HostPool(pages, size) if pages else None
