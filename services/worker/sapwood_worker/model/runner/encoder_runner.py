"""Runs an encoder on scheduler steps: whole prompts, embeddings or labels only, no KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sapwood_common.errors import UnimplementedError
from sapwood_kernels.ops.factory import device_ops
from sapwood_worker.model.checkpoint.encoder_weights import load_encoder
from sapwood_worker.model.checkpoint.sentence_config import read_sentence_config
from sapwood_worker.model.families.encoders.registry import encoder_family
from sapwood_worker.model.pools.host_pool import HostPool
from sapwood_worker.model.runner.options import DTYPES, RunnerOptions
from sapwood_worker.model.runner.pooling import Pooler
from sapwood_worker.model.sizes import CPU_RUNNING, CPU_STEP_TOKENS
from sapwood_worker.records.lora import Lora, LoraFacts
from sapwood_worker.records.model_info import ModelInfo
from sapwood_worker.records.output import Pooling
from sapwood_worker.records.step import CompletedStep, ModelOutput, Step
from sapwood_worker.records.weights import Memory, TrainerGroup, WeightBucket, WeightsFacts


class EncoderRunner:
    """Implements :class:`sapwood_worker.records.step.Runner` for encoders.

    It has no KV cache; it reports to the scheduler as many pages as all running requests can need.

    Args:
        options: What to run.

    Raises:
        ConfigError: The model cannot be loaded; names the file.
    """

    def __init__(self, options: RunnerOptions) -> None:
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        ops = device_ops(options.device)
        self._device = ops.device
        name = ops.default_dtype if options.dtype == "auto" else options.dtype
        family = encoder_family(options.model_path)
        assert family is not None
        dummy = options.load_format == "dummy"
        self._model, config = load_encoder(options.model_path, family, DTYPES[name], self._device, dummy=dummy)
        self._classifies = config.labels is not None
        length = min(config.max_position_embeddings, options.context_length or config.max_position_embeddings)
        sentences = read_sentence_config(options.model_path, "mean", length)
        self._pooler = Pooler(sentences.dense, config.hidden_size, self._device, whole=True)
        self.asynchronous = False
        running = options.max_running or CPU_RUNNING
        self._poolings: dict[int, Pooling] = {}
        self.vocabulary = None
        self.draft = None
        self.experts = None
        self.sums = self.check_pictures = self.picture_use = None
        self.host_pool: HostPool | None = None
        self.info = ModelInfo(
            architecture=family.name,
            dtype=name,
            context_length=length,
            vocab_size=config.vocab_size,
            eos_token_ids=(),
            page_size=options.page_size,
            num_pages=running * (-(-length // options.page_size) + 1),
            embedding_size=self._pooler.size if config.labels is None else 0,
            pooling=sentences.pooling if config.labels is None else "labels",
            normalizes=sentences.normalizes and config.labels is None,
            labels=config.labels,
            embedded_tokens=sentences.max_tokens,
            shortened=sentences.shortened,
            special_ids=sentences.special_ids,
            generates=False,
            encodes=True,
            max_running=running,
            max_step_tokens=options.max_step_tokens or CPU_STEP_TOKENS,
        )

    def exchanged_bytes(self, tokens: int) -> int:
        """None: it has no experts."""
        return 0

    def cache_identity(self) -> str:
        """Returns an empty text: nothing is cached."""
        return ""

    def read_lora(self, lora: Lora) -> LoraFacts:
        """Raises UnimplementedError: it takes no adapters."""
        raise UnimplementedError("an encoder serves no LoRA adapters")

    def drop_lora(self, number: int) -> None:
        """Nothing: it has none."""

    def stage_weights(self, bucket: WeightBucket) -> WeightsFacts:
        """Raises UnimplementedError: its weights do not change."""
        raise UnimplementedError("an encoder's weights cannot be changed while it serves")

    def ready_weights(self, update: int, *, partial: bool) -> WeightsFacts:
        """Raises UnimplementedError: its weights do not change."""
        raise UnimplementedError("an encoder's weights cannot be changed while it serves")

    def exchange_weights(self, update: int, *, keep: bool) -> bytes:
        """Raises UnimplementedError: its weights do not change."""
        raise UnimplementedError("an encoder's weights cannot be changed while it serves")

    def join_group(self, group: TrainerGroup) -> None:
        """Raises UnimplementedError: its weights do not change."""
        raise UnimplementedError("an encoder's weights cannot be changed while it serves")

    def leave_group(self, name: str) -> bool:
        """False: it is in none."""
        return False

    def release_memory(self, memory: Sequence[Memory], folder: str) -> int:
        """Raises UnimplementedError: it does not sleep."""
        raise UnimplementedError("an encoder does not sleep")

    def restore_memory(self, memory: Sequence[Memory], folder: str) -> None:
        """Nothing: it does not sleep."""

    def drop_weights(self, update: int) -> None:
        """Nothing: nothing is staged."""

    def launch(self, step: Step) -> CompletedStep:
        return CompletedStep(self.execute(step))

    @torch.inference_mode()
    def execute(self, step: Step) -> ModelOutput:
        """Takes O(longest prompt x requests): prompts are padded to the longest."""
        for entry in step.entries:
            self._poolings[entry.row] = entry.pooling
        counts = step.counts.tolist()
        if not counts:
            return ModelOutput(step.number, [])
        tokens = torch.zeros(len(counts), max(counts), dtype=torch.int64)
        mask = torch.arange(max(counts)) < torch.from_numpy(step.counts)[:, None]
        tokens[mask] = torch.from_numpy(step.token_ids)
        tokens, mask = tokens.to(self._device), mask.to(self._device)
        if self._classifies:
            logits = self._model(tokens, mask).float().cpu().numpy()
            return ModelOutput(step.number, [[] for _ in counts], pooled=dict(enumerate(logits)))
        hidden = self._model(tokens, mask)
        pooled = {
            part: self._pooler.pool(hidden[part, :count], self._poolings[row]).cpu().numpy()
            for part, (row, count) in enumerate(zip(step.rows.tolist(), counts, strict=True))
        }
        return ModelOutput(step.number, [[] for _ in counts], pooled=pooled)
