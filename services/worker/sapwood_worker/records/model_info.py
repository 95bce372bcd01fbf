"""What a loaded model is, as the scheduler and the gRPC front need to know it."""

from __future__ import annotations

from typing import Literal

import msgspec

from sapwood_worker.records.kv_layout import WindowGroup

SUM_METHODS = ("backend", "one-shot", "two-shot", "one-shot+norm", "two-shot+norm")
"""``backend``: that of torch.distributed. ``one-shot``: each rank gets what all others have and sums it. ``two-shot``: each rank
sums a share of it and gets the others' sums, which is less to move for large tensors. ``+norm``: adds the sum to a residual and
norms that, all in one.
"""

APART = "apart"
"""A sum by another method, then the residual and the norm apart from it: what ``+norm`` is compared with."""

OVERLAPPED = "overlapped"
"""Not a method: counts sums, by any method, that ran while the next piece of a product was computed."""

SUM_SIZES = tuple(1 << bits for bits in range(12, 23, 2))
"""Bytes of the tensors that are timed: 4 KiB to 4 MiB."""


class Labels(msgspec.Struct, frozen=True):
    """What the head of a model that classifies tells.

    Attributes:
        names: The labels' names, in the order of the head's logits.
        activation: What makes scores of the logits, as the model's files say; ``none``: they are scores.
    """

    names: tuple[str, ...]
    activation: Literal["softmax", "sigmoid", "none"]


class SumTime(msgspec.Struct, frozen=True, array_like=True):
    """What a sum of a tensor over the ranks takes.

    Attributes:
        method: By which method.
        num_bytes: The tensor's size.
        seconds: On the slowest rank.
    """

    method: str
    num_bytes: int
    seconds: float


class SumChoices(msgspec.Struct, frozen=True):
    """What sums tensors over the ranks of a layer.

    Attributes:
        words: The method for each size, for people; empty: there is one rank.
        times: By which they were chosen; empty: there was no choice.
        refused: What is not used since its trial failed, as in ``SUM_METHODS`` or ``OVERLAPPED``, and what was wrong.
    """

    words: str = ""
    times: tuple[SumTime, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()

    @property
    def told(self) -> str:
        """All of it but the times, for people."""
        return "; ".join([self.words, *(f"{name} is not used: {why}" for name, why in self.refused)])


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a loaded model and its page pool.

    Attributes:
        architecture: For example ``gemma3``, ``llama``, ``qwen3``.
        dtype: The dtype of weights and activations, for example ``float32``.
        context_length: Most tokens of prompt and output together: the model's own limit or what the pool can hold,
            whichever is less.
        vocab_size: Every token id is below it.
        eos_token_ids: The model's own end tokens.
        page_size: Tokens in a page.
        num_pages: Pages in the pool.
        windows: Where some layers see a window of tokens only, their pages, for each window: a step names pages of each.
        vocabulary_fingerprint: Hash of the tokens that grammars are masked with; empty: no structured output.
        special_tokens: Names of the vocabulary's special tokens, for compiling grammars.
        embedding_size: Numbers in an embedding; 0: it makes none.
        pooling: How embeddings are pooled unless a request says otherwise.
        normalizes: Whether embeddings have length 1 unless a request says otherwise.
        embedded_tokens: Inputs to embed are cut to this many tokens; 0: inputs longer than the context are refused.
        shortened: Lengths to which embeddings may be cut; empty: any; None: they may not be cut.
        special_ids: Special tokens; those at an input's end stay when it is cut.
        labels: What its head tells; it then makes neither tokens nor embeddings. None: it has no such head.
        generates: Whether it generates tokens.
        encodes: It sees its prompts whole and caches nothing.
        prefill_attention: The backend of prompts' attention; empty: the model has none of ours.
        decode_attention: The same for one token of each request.
        attention_reason: Why they were taken.
        expert_tiles: What the tiles of a GPU's expert products go by: ``model``, ``measured`` at this start, or a ``file`` of an
            earlier one; empty: there are none.
        expert_tile_sizes: Batch sizes whose tiles were measured.
        expert_exchange: Where ranks have whole experts, the bytes that they give each other for each token that an expert gets:
            its share of the token's vector to all other ranks and of the sums back, or of a sum by all ranks in shares; else 0.
        tensor_parallel: Ranks that its layers are split over.
        attention_ranks: How many ranks have requests and pages of their own (data-parallel attention); 1: all ranks run all
            requests.
        pipeline_parallel: Stages that its layers are spread over.
        all_reduce: What sums tensors over the ranks of a layer.
        micro_batches: Steps that its stages compute at once, of other requests each.
        micro_batches_from: The least number of running requests for which micro-batches pay; fewer requests are all in each step.
        chained: Whether its device computes by itself, so that a step may have tokens which the host does not know yet.
        logit_processors: Names of those that are installed.
        weights: The formats of its linear layers' weights, joined by ``+``.
        max_running: Most requests that its steps have room for.
        max_step_tokens: Most tokens of a step.
        sizes_reason: Why these sizes were chosen, and how the size of the KV cache follows; empty: nothing was chosen.
        sampling_defaults: Settings of sampling for requests that do not set them.
        speculate: What drafts tokens, as the setting names it.
        page_fingerprint: What pages hold besides tokens; equal only where pages can be used by each other. Empty: nobody asks.
    """

    architecture: str
    dtype: str
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    page_size: int
    num_pages: int
    vocabulary_fingerprint: bytes = b""
    page_fingerprint: bytes = b""
    special_tokens: tuple[str, ...] = ()
    embedding_size: int = 0
    pooling: str = "last"
    normalizes: bool = True
    embedded_tokens: int = 0
    shortened: tuple[int, ...] | None = None
    special_ids: tuple[int, ...] = ()
    labels: Labels | None = None
    generates: bool = True
    encodes: bool = False
    windows: tuple[WindowGroup, ...] = ()
    prefill_attention: str = ""
    decode_attention: str = ""
    attention_reason: str = ""
    expert_tiles: str = ""
    expert_tile_sizes: int = 0
    expert_exchange: float = 0.0
    tensor_parallel: int = 1
    attention_ranks: int = 1
    pipeline_parallel: int = 1
    all_reduce: SumChoices = SumChoices()
    micro_batches: int = 1
    micro_batches_from: int = 1
    chained: bool = False
    weights: str = ""
    logit_processors: tuple[str, ...] = ()
    max_running: int = 64
    max_step_tokens: int = 512
    sizes_reason: str = ""
    speculate: str = "off"
    sampling_defaults: dict[str, float] = {}
