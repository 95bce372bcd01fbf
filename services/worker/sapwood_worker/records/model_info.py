"""The facts about a loaded model that the scheduler and the gRPC front need."""

from __future__ import annotations

from typing import Literal

import msgspec

from sapwood_worker.records.kv_layout import StateSlots, WindowGroup
from sapwood_worker.records.pictures import PictureInfo

SUM_METHODS = ("backend", "one-shot", "two-shot", "one-shot+norm", "two-shot+norm")
"""``backend``: the all-reduce of torch.distributed. ``one-shot``: each rank reads all other ranks' tensors and sums them.
``two-shot``: each rank sums a share and reads the others' sums, which moves fewer bytes for large tensors. ``+norm``: also adds
the sum to a residual and norms it, in one kernel.
"""

APART = "apart"
"""A sum by another method with a separate addition and norm, as the comparison for ``+norm``."""

OVERLAPPED = "overlapped"
"""Not a method: the count of sums, by any method, that ran while the next chunk of a product was computed."""

SUM_SIZES = tuple(1 << bits for bits in range(12, 23, 2))
"""Bytes of the tensors that are timed: 4 KiB to 4 MiB."""


class Labels(msgspec.Struct, frozen=True):
    """The labels of a classification model's head.

    Attributes:
        names: The labels' names, in the order of the head's logits.
        activation: The function that turns logits into scores, from the model's files; ``none``: logits are scores.
    """

    names: tuple[str, ...]
    activation: Literal["softmax", "sigmoid", "none"]


class SumTime(msgspec.Struct, frozen=True, array_like=True):
    """The time of a sum of a tensor over the ranks.

    Attributes:
        method: By which method.
        num_bytes: The tensor's size.
        seconds: On the slowest rank.
    """

    method: str
    num_bytes: int
    seconds: float


class SumChoices(msgspec.Struct, frozen=True):
    """The all-reduce methods of a layer's ranks. Attributes:
    words: The method for each size, for people; empty: there is one rank.
    times: By which they were chosen; empty: there was no choice.
    refused: The methods (of ``SUM_METHODS``, or ``OVERLAPPED``) that are not used because their trial failed, and the faults.
    """

    words: str = ""
    times: tuple[SumTime, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()

    @property
    def told(self) -> str:
        """Everything except the times, as text for people."""
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
        windows: For each sliding window of some layers, its pages: a step names pages of each window.
        states: The slots for states of layers that keep one; None: no layer does.
        vocabulary_fingerprint: Hash of the tokens that grammars are masked with; empty: no structured output.
        special_tokens: Names of the vocabulary's special tokens, for compiling grammars.
        embedding_size: Numbers in an embedding; 0: it makes none.
        pooling: How embeddings are pooled unless a request says otherwise.
        normalizes: Whether embeddings have length 1 unless a request says otherwise.
        embedded_tokens: Inputs to embed are cut to this many tokens; 0: inputs longer than the context are refused.
        shortened: Lengths to which embeddings may be cut; empty: any; None: they may not be cut.
        special_ids: Special tokens; those at an input's end stay when it is cut.
        labels: The labels of its head; it then makes neither tokens nor embeddings. None: it has no such head.
        generates: Whether it generates tokens.
        encodes: Whether it is an encoder, which sees prompts whole and caches nothing.
        prefill_attention: The attention backend for prompts; empty: the model uses none of the backends.
        decode_attention: The same for one token of each request.
        attention_reason: Why these backends were chosen.
        expert_tiles: How the tiles of a GPU's expert products were chosen: by a cost ``model``, ``measured`` at this start, or
            from a ``file`` of an earlier start; empty: there are none.
        expert_tile_sizes: Batch sizes whose tiles were measured.
        expert_exchange: With whole experts on ranks, the bytes that ranks send each other for each token that an expert gets:
            the token's vector to other ranks and the sums back, or its part of an all-reduce; else 0.
        tensor_parallel: Ranks that its layers are split over.
        attention_ranks: How many ranks have requests and pages of their own (data-parallel attention); 1: all ranks run all
            requests.
        pipeline_parallel: Stages that its layers are spread over.
        all_reduce: The all-reduce methods of a layer's ranks.
        micro_batches: How many steps its stages compute at once, each of other requests.
        micro_batches_from: The least number of running requests for which micro-batches pay; fewer requests are all in each step.
        chained: Whether its device computes asynchronously, so that a step may have tokens that the host does not know yet.
        logit_processors: Names of those that are installed.
        weights: The formats of its linear layers' weights, joined by ``+``.
        max_running: Most requests that its steps have room for.
        max_step_tokens: Most tokens of a step.
        sizes_reason: Why these sizes were chosen, and how the size of the KV cache follows; empty: nothing was chosen.
        lora_slots: How many adapters its device holds at once; 0: it serves none.
        max_lora_rank: The largest rank of an adapter that it takes.
        pictures: What it does with pictures; None: it takes none.
        sampling_defaults: Settings of sampling for requests that do not set them.
        speculate: The drafter, as the setting names it.
        page_fingerprint: A hash of everything besides tokens that pages depend on; workers with equal ones can use each other's
            pages. Empty: not needed.
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
    states: StateSlots | None = None
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
    lora_slots: int = 0
    max_lora_rank: int = 0
    pictures: PictureInfo | None = None
    sampling_defaults: dict[str, float] = {}
