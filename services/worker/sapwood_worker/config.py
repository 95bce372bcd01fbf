"""The settings of a worker."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic_settings import NoDecode, SettingsConfigDict

from sapwood_common.models.needs import OF_HUB
from sapwood_common.settings.retired import Retired, retired_parts
from sapwood_worker.settings import (
    NEEDS,
    CudaGraphs,
    HostCache,
    Kernels,
    KvEvents,
    KvTransfer,
    LoraNames,
    LoraSlots,
    ModelSettings,
    Pictures,
    PrefixCaching,
    QueuePolicy,
    Role,
    Sglang,
    SpeculateChoice,
    StoragePrefetch,
    StructuredOutput,
    Watchdog,
)


class WorkerConfig(ModelSettings):
    """Configuration of a worker."""

    needs = (*ModelSettings.needs, OF_HUB, *NEEDS)
    retired: ClassVar = {
        **ModelSettings.retired,
        **retired_parts("sglang", sglang_tokenizer="tokenizer"),
        "kernels_wait": Retired("kernels", "wait", switch=True),
        **retired_parts("kernels", expert_tuning="tuning"),
        **retired_parts("cuda_graphs", cuda_graph_max_batch="max_batch"),
        **retired_parts("policy", starved_after="starved_after"),
        **retired_parts("watchdog_timeout", watchdog_restart="restart"),
        **retired_parts("prefix_cache", eviction="eviction"),
        **retired_parts(
            "kv_events",
            kv_events_host="host",
            kv_events_keys="key_folder",
            kv_events_format="format",
            kv_events_topic="topic",
            kv_events_keep="keep",
        ),
        "handoff_port": Retired("kv_transfer_port", ""),
        **retired_parts("kv_transfer", handoff_mover="backend", handoff_share="share"),
        **retired_parts("host_cache", host_cache_gb="gb", host_cache_ratio="ratio", host_write_policy="write"),
        **retired_parts(
            "storage_prefetch",
            storage_timeout="seconds",
            storage_timeout_per_1k="per_1k",
            storage_share="share",
            storage_min_tokens="min_tokens",
        ),
        **retired_parts("structured_output", grammar_backend="backend", grammar_timeout="timeout"),
        "jump_forward": Retired("structured_output", "jump_forward", switch=True),
    }

    model_config = SettingsConfigDict(env_prefix="SAPWOOD_WORKER_", extra="forbid", frozen=True)

    port: int = Field(50061, ge=0, le=65535, description="Port to listen on; 0 takes a free one and logs it.")
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port of /metrics; 0 takes a free one; none is 9161, or a free one with --port 0.",
    )
    sglang: Annotated[Sglang, NoDecode] = Field(
        Sglang(),
        description="Also answer SGLang's scheduler protocol on the same port, for gateways made for SGLang such as smg. "
        "tokenizer: folder of the tokenizer files that such gateways get from this worker; empty: the model's own folder. A "
        ".gguf file needs one, because gateways cannot read the tokenizer in it.",
    )
    page_size: int = Field(16, ge=1, le=1024, description="Tokens a page of the KV cache holds.")
    kv_cache_gb: float | None = Field(
        None,
        gt=0,
        description="Memory for the KV cache in GiB, for each rank. None: on a GPU what is left after a trial of the largest "
        "step; on a CPU 1, or an eighth of the memory of machine or container if that is less.",
    )
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] = Field(
        "auto",
        description="Of the KV cache; auto is the model's. fp8_e4m3 takes half the memory and less time, and keeps 3 bits of the "
        "mantissa of keys and values. Each layer's scale is the checkpoint's, or is measured with a trial prompt at the start.",
    )
    memory_fraction: float = Field(
        0.9, gt=0, le=1, description="Share of the GPU's memory to use in all, unless the KV cache's memory is given."
    )
    num_pages: int | None = Field(None, ge=2, description="Pages of the KV cache; none derives it from the memory.")
    context_length: int | None = Field(
        None, ge=2, description="Most tokens of prompt and output together; none takes the model's own."
    )
    max_running: int | None = Field(
        None,
        ge=1,
        description="Most requests in a batch. None: on a GPU up to 256, as the memory that the weights leave allows; on a CPU "
        "64.",
    )
    max_waiting: int = Field(1024, ge=1, description="Most requests in the queue; more are refused.")
    max_step_tokens: int | None = Field(
        None,
        ge=1,
        description="Most tokens that a step computes; longer prompts are computed in chunks. None: on a GPU up to 8192, as the "
        "memory that the weights leave allows; on a CPU 512.",
    )
    step_ms: float = Field(
        250.0,
        ge=0,
        description="How long a step lasts at most while requests decode, in milliseconds: it computes fewer tokens of prompts "
        "than --max-step-tokens if these would take longer, as measured. So a long prompt keeps the gap between other requests' "
        "tokens below it. Prompts always get twelve times the time that the decodes take alone; while nothing decodes a step may "
        "last four times as long. 0: no limit.",
    )
    overlap: bool = Field(
        True,
        description="On a GPU, plan and launch a step while the previous one is computed. A request that ends at an end token "
        "may be computed for one step too many.",
    )
    kernels: Annotated[Kernels, NoDecode] = Field(
        Kernels(),
        description="PATH[,wait=on][,tuning=60], on a GPU. PATH: an archive that `sapwood kernels build` has written, or a "
        "folder of archives: the one for this GPU and these packages is used. Kernels in the archive need no compilation, unless "
        "they have changed since. wait: wait for FlashInfer's libraries before the first request, if they have to be compiled, "
        "which takes a minute or two. Otherwise Triton's kernels compute prompts until the libraries are there, and decodes "
        "until the worker starts again. tuning: most seconds that a model's first start spends on measuring tile sizes for its "
        "experts' products; the result is kept in ~/.cache/sapwood for later starts. 0: a cost model chooses tile sizes.",
    )
    cuda_graphs: Annotated[CudaGraphs, NoDecode] = Field(
        CudaGraphs(),
        description="On a GPU, capture decode steps and small prefill steps as CUDA graphs at the start. Without them the worker "
        "starts sooner and has more memory for the KV cache, but each step of a small batch takes longer. max_batch: most tokens "
        "of a decode step that is captured; larger steps are computed like prompts. None: as many as requests may run.",
    )
    policy: Annotated[QueuePolicy, NoDecode] = Field(
        QueuePolicy(),
        description="Order of a tenant's requests in the queue: fcfs (by arrival), lpm (longest cached prefix first), "
        "dfs-weight (the branch of the prefix tree with the most requests first), lof (longest output first), random "
        "or priority (by the requests' priority; a higher one pushes running requests of a lower one back into the "
        "queue). starved_after: steps "
        "after which a waiting request is no longer overtaken by what the policy prefers, and a tenant that had no request "
        "admitted gets a turn.",
    )
    random_seed: int | None = Field(
        None,
        ge=0,
        lt=2**64,
        description="Makes runs repeatable: requests without a seed get seeds derived from this one, in the order in which they "
        "come; none: random seeds. It is for clients without a router: a router sends a seed with each request, by a flag of the "
        "same name.",
    )
    watchdog_timeout: Annotated[Watchdog, NoDecode] = Field(
        Watchdog(),
        description="Seconds after which a step counts as stuck: its stacks are logged, the worker turns unhealthy and routers "
        "give it nothing new. (A long prompt is many steps. A scheduler process that is stopped is noticed within seconds, "
        "whatever this says.) restart: seconds after which the scheduler process of a stuck step is replaced. Its requests end "
        "UNAVAILABLE, and routers continue them on other workers.",
    )
    crash_dump_folder: Path | None = Field(
        None,
        description="Folder for a file about each step that fails: the last 16 steps, the shapes of what they computed, the "
        "requests' ids and the load, but no tokens; the last 8 files are kept. None: nothing is written.",
    )
    conservativeness: float = Field(
        1.0,
        ge=0,
        description="Factor on the pages that stay free for the expected output of running requests when others are admitted. A "
        "smaller factor runs more requests at once, but sends requests back to the queue more often.",
    )
    prefix_cache: Annotated[PrefixCaching, NoDecode] = Field(
        PrefixCaching(),
        description="Keep the KV of finished work for requests that share a prefix. eviction: which cached prefix goes first "
        "when room is needed: the least recently (lru) or least often (lfu) used, the oldest (fifo), or lru with those used "
        "twice kept longest (slru).",
    )
    kv_events_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port on which KV events go out over ZeroMQ PUB, in the format of vLLM and SGLang; 0 takes a free one "
        "and logs it; none: they do not. (The gRPC stream of events is always there.) "
        "With --data-parallel-attention each rank has one, from this one up.",
    )
    kv_events_replay_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port on which ZeroMQ subscribers ask for events they missed; none: they cannot. "
        "With --data-parallel-attention each rank has one, from this one up.",
    )
    kv_events: Annotated[KvEvents, NoDecode] = Field(
        KvEvents(),
        description="HOST[,PART=VALUE]: how KV events go out over ZeroMQ. HOST: address that both ports listen on; none: "
        "127.0.0.1, or with a key_folder that of --host. Events have the tokens of all prompts. key_folder: the keys of those "
        "who may subscribe (ZeroMQ's CURVE): server.key_secret, and their public keys as clients/NAME.key; none: anybody who "
        "reaches the ports. format: a map, as vLLM 0.33 and SGLang 0.5.23 write events, or an array, as earlier versions did. "
        "topic: the messages' topic. keep: batches of events kept for replay.",
    )
    role: Role = Field(
        "both",
        description="What the worker does if routers can choose: prefill computes prompts and keeps their pages until a decode "
        "worker has read them; decode reads pages and generates; both does all of it. prefill and decode have a second tier of "
        "the KV cache as large as the first, unless its size is given.",
    )
    kv_transfer_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="TCP port at which decode workers read the pages that a prefill worker keeps; 0 takes a free one. "
        "With --data-parallel-attention each rank has one, from this one up.",
    )
    kv_transfer: Annotated[KvTransfer, NoDecode] = Field(
        KvTransfer(),
        description="BACKEND[,share=SHARE]. BACKEND carries pages from a prefill to a decode worker: auto (cuda or shm where "
        "possible, else tcp), tcp, shm (shared memory, on one host and as one user), cuda (out of the other's GPU by CUDA IPC, "
        "on one host), or, if both workers name it, nixl (NIXL over UCX) or mooncake (Mooncake's transfer engine). share: "
        "largest share of the second tier that a prefill worker uses for pages it keeps for others, or a decode worker "
        "for pages it reads.",
    )
    host_cache: Annotated[HostCache, NoDecode] = Field(
        HostCache(),
        description="GIB, or ratio=RATIO: the KV cache's second tier, in the host's memory, as GiB or as pages for each page of "
        "the first; 0: none. write: when pages are copied to it: once they are computed (write_through), once they are asked for "
        "a second time (write_through_selective), or when they are evicted from the first tier (write_back).",
    )
    storage: str = Field(
        "",
        description="URL of the KV cache's third tier, a store that workers share: file:///folder?size_gb=10, "
        "nixl://posix/folder, nixl://obj/bucket or mooncake://master:port?metadata=URL; needs a second tier. Empty: none.",
    )
    storage_prefetch: Annotated[StoragePrefetch, NoDecode] = Field(
        StoragePrefetch(),
        description="How long a queued request waits for its pages from the store: not at all (best_effort), until all are "
        "there (wait_complete), or until a time that grows with the prompt (timeout): seconds at least, and per_1k seconds more "
        "for each 1000 tokens looked for. share: largest share of the second tier that pages on their way from the store may "
        "take. min_tokens: fewest tokens worth fetching; none: measured at the start.",
    )
    structured_output: Annotated[StructuredOutput, NoDecode] = Field(
        StructuredOutput(),
        description="Serve requests with a grammar; costs memory and seconds at the start to index the vocabulary. backend: "
        "llguidance, xgrammar (of the extra [xgrammar]) or a package's own. jump_forward: text that a grammar forces takes no "
        "steps of its own; outputs are the same with and without. timeout: most seconds to compile a grammar that comes "
        "as a bare source, and to build one with xgrammar.",
    )
    speculate: SpeculateChoice = Field(
        "auto",
        description="Draft the tokens that probably come next, and check several of them in one step; outputs are the same with "
        "and without. prefix drafts from repetitions of the prompt, the output or the prefix cache, wherever that is often "
        "right; auto does the same only where measured step times say that it pays; draft:MODEL asks a smaller model with the "
        "same vocabulary, where it pays; eagle:MODEL asks an EAGLE-3 head that was trained for the model; mtp asks the layer "
        "for multi-token prediction in the model's own checkpoint (DeepSeek, GLM); off drafts nothing. MODEL is a name as for "
        "--model.",
    )

    pictures: Annotated[Pictures, NoDecode] = Field(
        Pictures(),
        description="Load the vision part of a model that has one and take pictures; --no-pictures serves text alone. cache_mb: "
        "memory of the device for pictures' encodings that are kept, in MiB. host_mb: the host's memory for those that a GPU "
        "gave up. max_mb: most pixels of a request, in MiB. step_tokens: tokens of pictures that a step may encode, of several "
        "pictures; none: as many as a step computes.",
    )
    lora_slots: Annotated[LoraSlots, NoDecode] = Field(
        LoraSlots(),
        description="SLOTS[,rank=RANK]: how many LoRA adapters the device holds at once, so that requests for them run in one "
        "batch; others wait in the host's memory. 0: none, and none can be loaded. rank: the largest rank of an adapter. A slot "
        "takes memory for that rank in all projections of the model. host_gb: GiB of the host's memory for adapters; those that "
        "nobody uses are dropped, and read again, when others need their room. resolver: finds adapters that requests name and "
        "that are not known: folder:FOLDER or folder:URL, where the adapter NAME is FOLDER/NAME, or NAME:ARGUMENT of a package's "
        "own; empty: nobody does.",
    )
    lora: LoraNames = Field(
        (),
        description="NAME=PATH ...: LoRA adapters that requests may name. PATH: a folder in PEFT's format, a name on the hub "
        "(owner/name), or a URL that fsspec reads. Each is read when a request first names it; with PATH,pinned before the "
        "worker is ready, and it stays in memory. Others can be loaded while it runs: sapwood lora load.",
    )

    @property
    def shares_host_cache(self) -> bool:
        """Whether decode workers of this host may read the second tier in place."""
        return self.role == "prefill" and self.kv_transfer.backend != "tcp" and hasattr(os, "memfd_create")

    @property
    def tier_ratio(self) -> float:
        """``ratio`` of ``host_cache``; where a role needs a second tier and none is given, 1."""
        return self.host_cache.ratio or float(self.role != "both" and not self.host_cache.gb)
