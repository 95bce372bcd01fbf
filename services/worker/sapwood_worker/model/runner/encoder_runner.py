"""Runs an encoder on scheduler steps: whole prompts, embeddings or labels only, no KV cache."""

from __future__ import annotations

import torch

from sapwood_kernels.ops.factory import device_ops
from sapwood_worker.model.checkpoint.bert_weights import load_bert
from sapwood_worker.model.checkpoint.sentence_config import read_sentence_config
from sapwood_worker.model.families.bert import BertClassifier
from sapwood_worker.model.pools.host_pool import HostPool
from sapwood_worker.model.runner.options import DTYPES, RunnerOptions
from sapwood_worker.model.runner.pooling import pool_chunk
from sapwood_worker.model.sizes import CPU_RUNNING, CPU_STEP_TOKENS
from sapwood_worker.records.model_info import ModelInfo
from sapwood_worker.records.output import Pooling
from sapwood_worker.records.step import CompletedStep, ModelOutput, Step


class EncoderRunner:
    """Implements :class:`sapwood_worker.records.step.Runner` for BERT-type models.

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
        self._model, config = load_bert(
            options.model_path, DTYPES[name], self._device, dummy=options.load_format == "dummy"
        )
        length = min(config.max_position_embeddings, options.context_length or config.max_position_embeddings)
        sentences = read_sentence_config(options.model_path, "mean", length)
        self.asynchronous = False
        running = options.max_running or CPU_RUNNING
        self._poolings: dict[int, Pooling] = {}
        self.vocabulary = None
        self.draft = None
        self.experts = None
        self.sums = None
        self.host_pool: HostPool | None = None
        self.info = ModelInfo(
            architecture="bert",
            dtype=name,
            context_length=length,
            vocab_size=config.vocab_size,
            eos_token_ids=(),
            page_size=options.page_size,
            num_pages=running * (-(-length // options.page_size) + 1),
            embedding_size=config.hidden_size if config.labels is None else 0,
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
        if isinstance(self._model, BertClassifier):
            logits = self._model(tokens, mask).float().cpu().numpy()
            return ModelOutput(step.number, [[] for _ in counts], pooled=dict(enumerate(logits)))
        hidden = self._model(tokens, mask)
        pooled = {
            part: pool_chunk(hidden[part, :count], self._poolings[row]).cpu().numpy()
            for part, (row, count) in enumerate(zip(step.rows.tolist(), counts, strict=True))
        }
        return ModelOutput(step.number, [[] for _ in counts], pooled=pooled)
