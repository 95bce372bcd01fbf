"""The names that settings take."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, Field
from pydantic_settings import NoDecode

from sapwood_common.errors import ConfigError
from sapwood_common.network.keyed_ways import read_key
from sapwood_common.plugins import part_names
from sapwood_common.settings.compound import Compound, Switch
from sapwood_common.settings.config import ServiceConfig
from sapwood_common.settings.needs import Needs
from sapwood_common.settings.retired import retired_parts

Role = Literal["both", "prefill", "decode"]
DispatchName = Literal["gather", "direct", "direct-float8"]
AllReduceName = Literal["auto", "backend", "one-shot", "two-shot"]
TransferBackendName = Literal["auto", "tcp", "shm", "nixl", "mooncake", "cuda"]
KvEventsFormat = Literal["map", "array"]
LanesName = Literal["auto", "always", "off"]
Half = Literal["prefill", "decode"]

LINEAR_METHODS = "sapwood.linear_methods"
"""The group of entry points by which packages bring formats of weights."""
QUANTIZATIONS = ("none", "fp8", "fp8_block", "fp8_tensor", "int8", "int4")
ATTENTION_BACKENDS = "sapwood.attention_backends"
"""The group of entry points by which packages bring what computes attention: each an ``AttentionBackend``."""
OWN_ATTENTION_BACKENDS = ("flashinfer", "triton", "native", "torch", "fixed_order")
GRAMMAR_BACKENDS = "sapwood.grammar_backends"
"""The group of entry points by which packages bring what enforces grammars: each a ``MakeBackend``."""
OWN_GRAMMAR_BACKENDS = ("llguidance", "xgrammar")


def attention_of(setting: str) -> dict[Half, str]:
    """The name for each half of attention: ``triton``, or ``prefill=triton,decode=flashinfer``; one left out is ``auto``.

    Raises:
        ValueError: The setting is malformed.
    """
    halves: tuple[Half, ...] = get_args(Half)
    if not {"=", ","} & set(setting):
        return dict.fromkeys(halves, setting)
    given = {half: name for half, _, name in (each.partition("=") for each in setting.split(","))}
    if not given.keys() <= set(halves) or not all(given.values()) or len(given) <= setting.count(","):
        raise ValueError(f"{setting!r}: write NAME, or prefill=NAME,decode=NAME")
    return {half: given.get(half, "auto") for half in halves}


def _known(name: str, group: str, own: Iterable[str]) -> str:
    names = part_names(group, dict.fromkeys(own))
    if name not in names:
        raise ValueError(f"{name!r} is none of {', '.join(names)}")
    return name


def _is_quantization(name: str) -> str:
    return _known(name, LINEAR_METHODS, QUANTIZATIONS)


def _is_grammar_backend(name: str) -> str:
    return _known(name, GRAMMAR_BACKENDS, OWN_GRAMMAR_BACKENDS)


def _is_attention(setting: str) -> str:
    for name in attention_of(setting).values():
        _known(name, ATTENTION_BACKENDS, ("auto", *OWN_ATTENTION_BACKENDS))
    return setting


def _is_speculation(name: str) -> str:
    kind, colon, model = name.partition(":")
    if kind not in ("draft", "eagle") if colon else name not in ("auto", "off", "prefix", "mtp"):
        raise ValueError(f"{name!r} is none of auto, off, prefix, mtp, draft:MODEL and eagle:MODEL")
    if colon and not model:
        raise ValueError(f"{name!r} names no model")
    return name


SpeculateChoice = Annotated[str, AfterValidator(_is_speculation)]
QuantizationName = Annotated[str, AfterValidator(_is_quantization)]
AttentionSetting = Annotated[str, AfterValidator(_is_attention)]
GrammarBackendName = Annotated[str, AfterValidator(_is_grammar_backend)]


# A worker's settings of several parts; the flags' help says what each part does.


class PipelineParallel(Compound):
    """``--pipeline-parallel``."""

    stages: int = Field(default=1, ge=1)
    micro_batches: LanesName = "auto"


class ExpertParallel(Switch):
    """``--expert-parallel``."""

    on: bool = False
    redundant: int = Field(default=0, ge=0)
    dispatch: DispatchName = "gather"


class Sglang(Switch):
    """``--sglang``."""

    on: bool = False
    tokenizer: str = ""


class Kernels(Compound):
    """``--kernels``."""

    path: Path | None = None
    wait: bool = False
    tuning: float = Field(default=60.0, ge=0)


class CudaGraphs(Switch):
    """``--cuda-graphs``."""

    on: bool = True
    max_batch: int | None = Field(default=None, ge=1)


class QueuePolicy(Compound):
    """``--policy``."""

    name: Literal["fcfs", "lpm", "dfs-weight", "lof", "random", "priority"] = "fcfs"
    starved_after: int = Field(default=1024, ge=1)


class Watchdog(Compound):
    """``--watchdog-timeout``."""

    seconds: float = Field(default=300.0, gt=0)
    restart: float = Field(default=600.0, gt=0)


class PrefixCaching(Switch):
    """``--prefix-cache``."""

    on: bool = True
    eviction: Literal["lru", "lfu", "fifo", "slru"] = "lru"


class KvEvents(Compound):
    """``--kv-events``."""

    host: str | None = None
    key_folder: Path | None = None
    format: KvEventsFormat = "map"
    topic: str = "kv-events"
    keep: int = Field(default=10_000, ge=1)


class KvTransfer(Compound):
    """``--kv-transfer``."""

    backend: TransferBackendName = "auto"
    share: float = Field(default=0.5, gt=0, le=1)


class HostCache(Compound):
    """``--host-cache``."""

    gb: float = Field(default=0.0, ge=0)
    ratio: float = Field(default=0.0, ge=0)
    write: Literal["write_through", "write_through_selective", "write_back"] = "write_through"


class StoragePrefetch(Compound):
    """``--storage-prefetch``."""

    mode: Literal["best_effort", "wait_complete", "timeout"] = "timeout"
    seconds: float = Field(default=1.0, ge=0)
    per_1k: float = Field(default=0.25, ge=0)
    share: float = Field(default=0.5, gt=0, le=1)
    min_tokens: int | None = Field(default=None, ge=1)


class StructuredOutput(Switch):
    """``--structured-output``."""

    on: bool = True
    backend: GrammarBackendName = "llguidance"
    jump_forward: bool = True
    timeout: float = Field(default=10.0, gt=0)


class LoraSlots(Compound):
    """``--lora-slots``."""

    slots: int = Field(default=0, ge=0)
    rank: int = Field(default=64, ge=1, le=512)
    host_gb: float = Field(default=4.0, gt=0)
    resolver: str = ""


class Pictures(Switch):
    """``--pictures``."""

    on: bool = True
    cache_mb: float = Field(default=512.0, ge=0)
    host_mb: float = Field(default=1024.0, ge=0)
    max_mb: float = Field(default=48.0, gt=0, le=48)
    step_tokens: int | None = Field(default=None, ge=1)


PINNED = ",pinned"
"""Ends a value of ``--lora`` whose adapter stays in memory."""


def named_loras(values: Iterable[str]) -> list[tuple[str, str, bool]]:
    """The adapters that ``--lora`` names: name, path, and whether each stays in memory.

    Raises:
        ValueError: A value is malformed, or names one twice.
    """
    found: dict[str, tuple[str, str, bool]] = {}
    for value in values:
        name, equals, path = value.partition("=")
        pinned = path.endswith(PINNED)
        path = path.removesuffix(PINNED)
        if not (name.strip() and equals and path):
            raise ValueError(f"{value!r}: write NAME=PATH, or NAME=PATH{PINNED}")
        if name in found:
            raise ValueError(f"{name} is given twice")
        found[name] = name, path, pinned
    return list(found.values())


def _are_loras(values: tuple[str, ...]) -> tuple[str, ...]:
    named_loras(values)
    return values


LoraNames = Annotated[tuple[str, ...], AfterValidator(_are_loras)]


# What a worker's settings need to have an effect.


def _has_lora_slots(config: Any) -> bool:
    return bool(config.lora_slots.slots)


NEEDS = (
    Needs(
        ("host_cache", "storage", "storage_prefetch", "prefix_cache.eviction"),
        lambda config: config.prefix_cache.on,
        "without {prefix_cache}",
    ),
    Needs(
        ("host_cache.write", "storage", "storage_prefetch"),
        lambda config: config.host_cache.gb or config.tier_ratio,
        "without a second tier: {host_cache}",
    ),
    Needs(("host_cache.ratio",), lambda config: not config.host_cache.gb, "with {host_cache} in GiB"),
    Needs(("role",), lambda config: config.prefix_cache.on, "without {prefix_cache}: pages are passed on from there"),
    Needs(
        ("role",),
        lambda config: config.tls_cert is None or config.tls_client_ca is not None,
        "with {tls_cert} and without {tls_client_ca}, by which workers check each other's certificates",
    ),
    Needs(
        ("kv_transfer_port", "kv_transfer"),
        lambda config: config.host_cache.gb or config.tier_ratio,
        "without {role}, or a second tier with which it can change: {host_cache}",
    ),
    Needs(
        ("host_cache.write",),
        lambda config: config.role != "prefill",
        "with {role} prefill, whose pages go to the host at once",
    ),
    Needs(
        ("storage_prefetch.seconds", "storage_prefetch.per_1k"),
        lambda config: config.storage_prefetch.mode == "timeout",
        "unless {storage_prefetch} is timeout",
    ),
    Needs(
        ("policy",),
        lambda config: config.prefix_cache.on or config.policy.name not in ("lpm", "dfs-weight"),
        "without {prefix_cache}: it goes by what is cached",
    ),
    Needs(
        ("attention_backend",),
        lambda config: not config.deterministic,
        "with {deterministic}, which has its own attention",
    ),
    Needs(("expert_parallel",), lambda config: config.tensor_parallel > 1, "with a {tensor_parallel} of 1"),
    Needs(
        ("pipeline_parallel.micro_batches",),
        lambda config: config.pipeline_parallel.stages > 1,
        "with a {pipeline_parallel} of 1",
    ),
    Needs(("all_reduce",), lambda config: config.tensor_parallel > 1, "with a {tensor_parallel} of 1"),
    Needs(("data_parallel_attention",), lambda config: config.tensor_parallel > 1, "with a {tensor_parallel} of 1"),
    Needs(
        ("data_parallel_attention",), lambda config: config.pipeline_parallel.stages == 1, "with {pipeline_parallel}"
    ),
    Needs(
        ("all_reduce",),
        lambda config: not config.data_parallel_attention or config.all_reduce != "two-shot",
        "with {data_parallel_attention}, where a rank gets the sums of its own rows only, if it is two-shot",
    ),
    Needs(
        ("speculate",),
        lambda config: not config.data_parallel_attention or config.speculate in ("auto", "prefix", "off"),
        "with {data_parallel_attention}, unless it is auto, prefix or off",
    ),
    Needs(
        ("lora", "lora_slots.rank", "lora_slots.host_gb", "lora_slots.resolver"),
        _has_lora_slots,
        "without {lora_slots}",
    ),
    Needs(
        ("lora_slots",),
        lambda config: not config.data_parallel_attention,
        "with {data_parallel_attention}: a rank does not know the adapters of other ranks' rows",
    ),
    Needs(("expert_parallel.redundant",), lambda config: config.expert_parallel.on, "without {expert_parallel} on"),
    Needs(
        ("expert_parallel.dispatch",),
        lambda config: config.expert_parallel.on and config.data_parallel_attention,
        "without {expert_parallel} and {data_parallel_attention}: all ranks have all rows",
    ),
    Needs(
        ("expert_parallel.dispatch",),
        lambda config: config.nnodes == 1,
        "with {nnodes}: ranks write to each other's memory",
    ),
    Needs(
        ("expert_parallel.redundant",),
        lambda config: config.pipeline_parallel.stages == 1,
        "with {pipeline_parallel}: experts move on ranks that have all layers",
    ),
    Needs(("node_rank", "rendezvous", "rendezvous_key"), lambda config: config.nnodes > 1, "without {nnodes}"),
    Needs(("sglang.tokenizer",), lambda config: config.sglang.on, "without {sglang} on"),
    Needs(("kv_events_port",), lambda config: config.prefix_cache.on, "without {prefix_cache}"),
    Needs(
        ("kv_events_replay_port", "kv_events"),
        lambda config: config.kv_events_port is not None,
        "without {kv_events_port}",
    ),
    Needs(
        ("kv_events.keep",),
        lambda config: config.kv_events_replay_port is not None,
        "without {kv_events_replay_port}",
    ),
    Needs(("kv_cache_gb", "memory_fraction"), lambda config: config.num_pages is None, "with {num_pages}"),
    Needs(("memory_fraction",), lambda config: config.kv_cache_gb is None, "with {kv_cache_gb}"),
    Needs(
        ("cuda_graphs",),
        lambda config: config.dtype != "float32",
        "with {dtype} float32, which is never captured",
    ),
    Needs(("cuda_graphs.max_batch",), lambda config: config.cuda_graphs.on, "without {cuda_graphs}"),
    Needs(("stored_weights",), lambda config: config.load_format == "auto", "with {load_format} dummy"),
    Needs(
        ("cuda_graphs.max_batch",),
        lambda config: attention_of(config.attention_backend)["decode"] != "torch",
        "with {attention_backend} torch, whose decodes are never captured",
    ),
    Needs(
        ("cuda_graphs.max_batch",),
        lambda config: config.max_running is None or config.cuda_graphs.max_batch < config.max_running,
        "with a {max_running} that is no larger",
    ),
    Needs(
        ("structured_output.jump_forward", "structured_output.timeout", "structured_output.backend"),
        lambda config: config.structured_output.on,
        "without {structured_output}",
    ),
)


# Which model a worker runs, in what formats, and on which ranks.


class ModelSettings(ServiceConfig):
    """The part of a worker's configuration that is about its model."""

    retired: ClassVar = {
        **ServiceConfig.retired,
        **retired_parts("pipeline_parallel", pipeline_lanes="micro_batches"),
        **retired_parts("expert_parallel", redundant_experts="redundant", expert_dispatch="dispatch"),
    }

    model: str = Field(
        "demo",
        description="'demo', 'demo-base', a .gguf file, a Hugging Face model directory, or a model of the hub, fetched if it is "
        "not in the hub's cache (owner/name or owner/name:file.gguf), or a URL that fsspec reads (s3://bucket/folder).",
    )
    revision: str | None = Field(
        None, description="Branch, tag or commit of a model of the hub; none is its main branch."
    )
    served_model_name: str | None = Field(None, description="Name that clients use; none takes the file's own.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where the model runs; auto takes CUDA if it is there."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Of weights and KV; auto is float32 on CPU and bfloat16 on CUDA."
    )
    load_format: Literal["auto", "dummy"] = Field(
        "auto", description="dummy fills the model with random weights of the true shape: for speed tests."
    )
    quantization: QuantizationName = Field(
        "none",
        description="Quantises linear layers and experts as the model is loaded. fp8: weights and activations in float8, with "
        "one scale for each token and each output channel. fp8_block: a scale for each 128 numbers of a token and each "
        "128 x 128 of a weight. "
        "fp8_tensor: one scale for all tokens of a step and one for a weight. int8: weights and activations in 8 bits, with "
        "scales as fp8. int4: weights in 4 bits, with a scale and a zero for each 128 numbers, and an output head that is not "
        "the embedding, too, in 8 bits, with a scale for each token. Embedding and other output heads stay as they are, and so "
        "do weights that the checkpoint stores quantised. Packages can bring more formats.",
    )
    stored_weights: Literal["keep", "widen"] = Field(
        "keep",
        description="What becomes of quantised weights in the checkpoint, such as GGUF's on a CPU, if this device can multiply "
        "with them as they are: keep leaves them as stored; widen converts them to the model's dtype, which takes more memory.",
    )
    sampling_defaults: Literal["model", "none"] = Field(
        "model",
        description="Where settings of sampling come from that a request leaves out: model takes those of the model's "
        "generation_config.json or GGUF file (temperature, top_p and such), as vLLM and SGLang do; none takes the API's "
        "own defaults.",
    )
    attention_backend: AttentionSetting = Field(
        "auto",
        description="What computes attention: flashinfer, triton, native (decodes in float32 on a CPU), torch or a package's "
        "own. prefill=triton,decode=flashinfer sets it for prompts and decodes separately. auto takes the fastest that can "
        "serve the model on this device.",
    )
    deterministic: bool = Field(
        False,
        description="Compute each request the same to the bit, whatever runs beside it: tokens and log probabilities do not "
        "depend on the batch, on hits of the prefix cache or on how prompts are cut. For models without experts, latent "
        "attention or states, with weights in 16 bits or in float32 on a CPU, by one rank; anything else is refused by name.",
    )
    tensor_parallel: int = Field(
        1,
        ge=1,
        description="Ranks that each layer is split over, on one machine: a process each, with a GPU each. Has to divide the "
        "model's attention heads and the width of its MLPs.",
    )
    pipeline_parallel: Annotated[PipelineParallel, NoDecode] = Field(
        PipelineParallel(),
        description="Stages that the layers are spread over, each of --tensor-parallel ranks. A step goes through one stage "
        "after the other, a long step in chunks, so that all stages compute. micro_batches: whether stages compute several steps "
        "at once, of other requests each: auto does on CPUs, on GPUs from as many requests on as a trial at the start says; "
        "always; off.",
    )
    nnodes: int = Field(
        1,
        ge=1,
        description="Hosts that the ranks are spread over evenly. Each host runs a worker with the same flags; the first one "
        "answers requests, the others only compute.",
    )
    node_rank: int = Field(0, ge=0, description="Which of --nnodes this host is; 0 is the first.")
    rendezvous: str = Field(
        "",
        description="HOST:PORT at which the first of --nnodes waits for the others: an address of that host that they can reach.",
    )
    rendezvous_key: Path | None = Field(
        None,
        description="File with a secret that all of --nnodes have alike, by which they know each other: openssl rand -hex 32.",
    )
    expert_parallel: Annotated[ExpertParallel, NoDecode] = Field(
        ExpertParallel(),
        description="Whether each rank of --tensor-parallel gets whole experts, equally many, instead of a part of every expert. "
        "redundant: extra slots for experts in a layer, spread evenly over the ranks. Experts that get many tokens are copied "
        "into them and moved, a few at a time, so that all ranks have equally much to compute. 0: experts stay where they are. "
        "dispatch: how rows reach experts with --data-parallel-attention: gather (all rows go to all ranks), direct (each row "
        "goes to the ranks that have its experts, which write their sums back) or direct-float8 (the same, with rows in 8 bits "
        "on the way there). The last two are for ranks of one host. They are tested at the start, and gather is used if they "
        "are not exact.",
    )
    all_reduce: AllReduceName = Field(
        "auto",
        description="What sums the parts of --tensor-parallel ranks: backend (NCCL, or gloo on CPUs), one-shot (each rank gets "
        "all parts over memory that they share and sums them) or two-shot (each rank sums a share and gets the others' sums). "
        "auto times those whose sums are exact on this machine, at the start, and takes the quickest for each size. Ranks on "
        "several hosts use the backend. With --data-parallel-attention this is how rows are exchanged, and there is no "
        "two-shot.",
    )
    data_parallel_attention: bool = Field(
        False,
        description="Whether each rank of --tensor-parallel has requests of its own, computes their attention alone and keeps "
        "their pages. MLPs and experts are still split over all ranks. It is for models whose KV cache cannot be split over "
        "ranks (latent attention, few key heads): with N ranks the cache then holds N times as many tokens. --max-running, "
        "--max-step-tokens and --num-pages count for each rank.",
    )
    threads: int = Field(0, ge=0, description="CPU threads of the model, which its ranks share; 0 takes all cores.")

    @property
    def meeting_place(self) -> tuple[str, int]:
        """Host and port of ``rendezvous``.

        Raises:
            ConfigError: It has none, there is no key, or ranks and nodes do not fit.
        """
        host, _, port = self.rendezvous.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"--rendezvous {self.rendezvous!r}: --nnodes {self.nnodes} needs HOST:PORT")
        if self.ranks % self.nnodes:
            raise ConfigError(f"--nnodes {self.nnodes}: {self.ranks} ranks cannot be spread evenly over so many")
        if self.node_rank >= self.nnodes:
            raise ConfigError(f"--node-rank {self.node_rank} is not below --nnodes {self.nnodes}")
        if self.rendezvous_key is None:
            raise ConfigError(
                f"--rendezvous-key: --nnodes {self.nnodes} needs a file with a secret that all hosts have"
            )
        return host.strip("[]"), int(port)

    @property
    def group_key(self) -> bytes:
        """The key by which the hosts know each other.

        Raises:
            ConfigError: It cannot be read.
        """
        assert self.rendezvous_key is not None, "meeting_place was asked for before"
        return read_key(self.rendezvous_key, "--rendezvous-key")

    @property
    def ranks(self) -> int:
        """Processes that run the model together."""
        return self.tensor_parallel * self.pipeline_parallel.stages
