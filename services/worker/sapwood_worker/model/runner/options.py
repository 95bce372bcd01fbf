"""What a runner is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.loader import LoadFormat, StoredWeights
from sapwood_worker.settings import LanesName

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """What to run and with what memory.

    Attributes:
        model_path: A ``.gguf`` file or a Hugging Face directory.
        load_format: ``dummy`` reads only the configuration and makes random weights.
        device: A torch device.
        dtype: The dtype of weights, activations and cache; ``auto`` is float32 on a CPU, else bfloat16.
        page_size: Tokens in a page.
        num_pages: Pages in the pool; None: as many as fit in ``kv_cache_bytes``.
        kv_cache_bytes: Bytes of a rank's pool, unless ``num_pages`` is given; None: on CUDA the part of ``memory_fraction`` that
            a trial of the largest step leaves, elsewhere 1 GiB, or an eighth of the memory that there is if that is less.
        quantization: How linear layers are quantised: ``fp8`` has scales for each token and output channel, ``fp8_block`` for
            128 numbers of a token and 128 x 128 of the weight, ``fp8_tensor`` one for each tensor.
        sampling_defaults: ``model`` takes those of ``generation_config.json``, ``none`` takes none.
        stored_weights: ``keep`` multiplies with quantised weights as stored where possible, ``widen`` converts them to the
            model's dtype.
        kv_cache_dtype: The pool's dtype: ``auto`` is the model's.
        memory_fraction: Largest share of the GPU's memory that may be in use, other programs' included.
        max_step_tokens: The most tokens in a step, also used in the trial; None: chosen for device and model.
        context_length: Upper limit of prompt and output together; None: the model's own.
        max_running: The most requests in a step; the pool must have a page for each. None: chosen for device and model.
        cuda_graphs: Whether decode steps and small prefill steps are captured as CUDA graphs, on a GPU.
        expert_tuning: The most seconds for measuring the tiles of experts, on a GPU; 0: a cost model chooses the tiles.
        cuda_graph_max_batch: Most tokens of a captured decode step; None: ``max_running``.
        threads: CPU threads of torch and of loading; None: torch's own choice. Set for the whole process.
        seed: Seed of dummy weights.
        attention_backend: As ``attention.registry.choose_backend`` takes it.
        deterministic: Whether each row of a step is computed the same whatever rows are beside it; ``attention_backend`` is then
            ``fixed_order``.
        shared_prefix_attention: Whether keys that decodes share are read once for all of them, if the backend can do this and it
            pays.
        kernels_wait: Whether to wait for libraries that must be compiled, instead of using a fallback backend for prompts until
            they are ready.
        structured_output: Whether the vocabulary is read for requests with a grammar.
        host_cache_gb: Memory of the KV cache's second tier in GiB; 0: the ratio decides.
        host_cache_ratio: Pages of the second tier for each page of the pool; 0: ``host_cache_gb`` decides. Both 0: there is no
            second tier.
        share_host_cache: Whether that tier lies in memory that other processes of this host can read.
        one_table: Whether all layers' pages are in one page table, windows or not.
        parallel: The groups of ranks that this process runs the model with.
        nodes: Hosts that they are on, equally many on each.
        meeting_host: Rank 0's address, if they are several.
        micro_batches: Whether the stages of a pipeline compute several steps at once: on GPUs ``auto`` does where a trial says
            that it pays.
        headed: Whether a head drafts from the model's hidden states. Only rank 0 drafts, but all ranks then compute the same
            steps in the same way.
        lora_slots: How many adapters the device holds at once; 0: it serves none.
        lora_rank: The largest rank of an adapter.
        pictures: Whether a vision part that the model has is loaded.
        picture_cache_bytes: Bytes of pictures' encodings that are kept for later.
        picture_host_bytes: And how many in the host's memory, of those that gave way; a CPU's are all there.
        most_picture_bytes: The most bytes of pixels of a request.
    """

    model_path: Path
    load_format: LoadFormat = "auto"
    device: str = "cpu"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    page_size: int = 16
    num_pages: int | None = None
    kv_cache_bytes: int | None = None
    quantization: str = "none"
    stored_weights: StoredWeights = "keep"
    sampling_defaults: Literal["model", "none"] = "model"
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] = "auto"
    memory_fraction: float = 0.9
    max_step_tokens: int | None = 8192
    context_length: int | None = None
    max_running: int | None = 64
    cuda_graphs: bool = True
    expert_tuning: float = 0.0
    cuda_graph_max_batch: int | None = None
    threads: int | None = None
    seed: int = 0
    attention_backend: str = "auto"
    deterministic: bool = False
    shared_prefix_attention: bool = True
    kernels_wait: bool = True
    structured_output: bool = False
    host_cache_gb: float = 0.0
    host_cache_ratio: float = 0.0
    share_host_cache: bool = False
    one_table: bool = False
    parallel: Parallel = field(default_factory=Parallel)
    nodes: int = 1
    meeting_host: str = ""
    micro_batches: LanesName = "auto"
    headed: bool = False
    lora_slots: int = 0
    lora_rank: int = 64
    pictures: bool = True
    picture_cache_bytes: int = 512 << 20
    picture_host_bytes: int = 0
    most_picture_bytes: int = 48 << 20
