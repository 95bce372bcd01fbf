"""Makes the runner that a worker's configuration asks for."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch

from sapwood_common.errors import ConfigError
from sapwood_common.models.model_files import resolve_model
from sapwood_common.models.progress import logged
from sapwood_common.settings.config import refuse_idle
from sapwood_common.settings.needs import Needs
from sapwood_kernels.ops.factory import device_ops
from sapwood_worker.config import WorkerConfig
from sapwood_worker.model.checkpoint.hf_config import classifies
from sapwood_worker.model.compiled_kernels import take_kernels
from sapwood_worker.model.distributed.custom_all_reduce import choose_sums
from sapwood_worker.model.distributed.data_parallel import DataParallelRows
from sapwood_worker.model.distributed.group import Group
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.distributed.torch_group import join_groups
from sapwood_worker.model.families.encoders.registry import encoder_family
from sapwood_worker.model.gpu import check_gpu, read_gpu
from sapwood_worker.model.loader import read_config
from sapwood_worker.model.runner.builder import build_drafted_runner, build_headed_runner, build_runner
from sapwood_worker.model.runner.deterministic import refuse_for_determinism
from sapwood_worker.model.runner.encoder_runner import EncoderRunner
from sapwood_worker.model.runner.model_runner import ModelRunner
from sapwood_worker.model.runner.options import RunnerOptions
from sapwood_worker.model.runner.state_refusals import refuse_for_states
from sapwood_worker.records.ranks import ALONE, Place

logger = logging.getLogger(__name__)

_NO_CACHE = "with a model that makes embeddings only or classifies, and caches nothing"
_GRAPHS = ("cuda_graphs", "kernels.tuning")
ON_CPU = (Needs(("memory_fraction", "overlap", "kernels.wait", *_GRAPHS), lambda config: False, "on a CPU"),)
OF_ENCODERS = (
    Needs(
        (
            *("tensor_parallel", "pipeline_parallel", "data_parallel_attention", "expert_parallel", "all_reduce"),
            *("quantization", "stored_weights", "sampling_defaults", "kv_cache_dtype", "kv_cache_gb", "num_pages"),
            *("page_size", "memory_fraction", "overlap", "conservativeness", "prefix_cache", "kv_events_port"),
            *("kv_events_replay_port", "kv_events", "host_cache", "storage", "storage_prefetch", "structured_output"),
            *(
                "attention_backend",
                "deterministic",
                "kernels.wait",
                "speculate",
                "role",
                *_GRAPHS,
                "lora_slots",
                "pictures",
            ),
        ),
        lambda config: False,
        _NO_CACHE,
    ),
    Needs(
        ("policy",),
        lambda config: config.policy.name in ("fcfs", "priority"),
        f"{_NO_CACHE}, unless it is priority",
    ),
)
OF_CLASSIFIERS = (
    Needs(("structured_output", "deterministic", *_GRAPHS), lambda config: False, "with a model that only classifies"),
)


_MEETING_SECONDS = 120.0
_EXCHANGE_SECONDS = 1800.0
"""Seconds that ranks wait for each other: one may take that much longer to read its weights, or to fetch the model (rank 0)."""


def make_runner(config: WorkerConfig, place: Place = ALONE) -> ModelRunner | EncoderRunner:
    """Loads the model, or a rank's part of it, once all ranks have met.

    Args:
        config: The configuration.
        place: Which rank this process is.

    Raises:
        ConfigError: The model cannot be loaded, the device does not exist or cannot run a worker, or a setting would have no
            effect.
    """
    device = _choose_device(config, place)
    first = place.rank % place.on_node == 0
    if not first:  # the first comes when the model is on this machine
        parallel = _meet(config, place, device)
    path = resolve_model(config.model, config.revision, weights=config.load_format != "dummy", progress=logged(logger))
    encodes = encoder_family(path) is not None
    if encodes:
        refuse_idle(config, OF_ENCODERS)
    elif path.is_dir() and classifies(path):
        refuse_idle(config, OF_CLASSIFIERS)
    if device == "cpu":
        refuse_idle(config, ON_CPU)
    if not encodes:
        model = read_config(path)[1]
        refuse_for_states(config, model)
        refuse_for_determinism(config, model, device)
    if device != "cpu":
        _ready_gpu(config, device)
    if first:
        if place.size > 1 and not encodes:
            _check_split(config, path)
        parallel = _meet(config, place, device)
    options = _runner_options(config, place, path, device, parallel)
    if encodes:
        return EncoderRunner(options)
    kind, _, drafter = config.speculate.partition(":")
    if kind in ("eagle", "mtp"):
        if config.pipeline_parallel.stages > 1:
            raise ConfigError(f"--speculate {kind}: a head has no hidden states of a pipeline's earlier stages")
        if place.rank:  # only rank 0 drafts: it has all hidden states that a head takes
            return build_runner(replace(options, headed=True))
        return build_headed_runner(options, _resolve_drafter(config, drafter) if drafter else None)
    if (
        not drafter or place.rank
    ):  # one rank drafts alone, because ranks would wait for each other at each layer of a small model
        return build_runner(options)
    return build_drafted_runner(options, _draft_options(config, options, drafter))


def _choose_device(config: WorkerConfig, place: Place) -> str:
    """Chooses the device of a rank; one of several GPUs becomes torch's current device."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device: no CUDA device is available here")
    device: str = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and place.size > 1:
        if place.on_node > torch.cuda.device_count():
            flags = f"--tensor-parallel {config.tensor_parallel} --pipeline-parallel {config.pipeline_parallel.stages}"
            raise ConfigError(f"{flags}: there are {torch.cuda.device_count()} GPUs here")
        device = f"cuda:{place.rank % place.on_node}"
        torch.cuda.set_device(place.rank % place.on_node)
    return device


def _check_split(config: WorkerConfig, path: Path) -> None:
    """Raises an error if the model's heads, layers or experts cannot be split over the ranks, before the ranks meet and load."""
    model, group = read_config(path)[1], Group()
    if model.sparse is not None and config.expert_parallel.on:
        ranks, experts = Group(), model.sparse.routing.experts
        ranks.size = config.tensor_parallel
        placed = Parallel(ep=ranks, redundant_experts=config.expert_parallel.redundant)
        placed.own_experts(experts)
        placed.spare_slots(experts)
    group.size = 1 if config.data_parallel_attention else config.tensor_parallel
    heads = Parallel(tp=group)
    if any(map(model.attends, range(model.num_layers))):
        heads.shard("num_attention_heads", model.num_heads)
        if model.latent is None:
            heads.shard("num_key_value_heads", model.num_kv_heads, copies=True)
    if config.pipeline_parallel.stages > model.num_layers:
        raise ConfigError(
            f"--pipeline-parallel {config.pipeline_parallel.stages}: num_hidden_layers is {model.num_layers}, fewer than stages"
        )


def _ready_gpu(config: WorkerConfig, device: str) -> None:
    """Checks that a GPU can run a worker, logs warnings about it, and unpacks kernels that were compiled for it."""
    given = config.num_pages is not None or config.kv_cache_gb is not None
    warnings = check_gpu(
        read_gpu(torch.device(device)),
        dtype=config.dtype,
        kv_cache_dtype=config.kv_cache_dtype,
        quantization=config.quantization,
        memory_fraction=None if given else config.memory_fraction,
    )
    for warning in warnings:
        logger.warning(warning)
    if config.kernels.path is not None:
        take_kernels(config.kernels.path)


def _runner_options(config: WorkerConfig, place: Place, path: Path, device: str, parallel: Parallel) -> RunnerOptions:
    """What the runner is made of, drafts apart."""
    return RunnerOptions(
        parallel=parallel,
        nodes=place.nodes,
        meeting_host=place.host,
        model_path=path,
        load_format=config.load_format,
        device=device,
        dtype=config.dtype,
        page_size=config.page_size,
        num_pages=config.num_pages,
        kv_cache_bytes=None if config.kv_cache_gb is None else int(config.kv_cache_gb * (1 << 30)),
        quantization=config.quantization,
        stored_weights=config.stored_weights,
        sampling_defaults=config.sampling_defaults,
        kv_cache_dtype=config.kv_cache_dtype,
        memory_fraction=config.memory_fraction,
        max_step_tokens=config.max_step_tokens,
        context_length=config.context_length,
        max_running=config.max_running,
        cuda_graphs=config.cuda_graphs.on,
        expert_tuning=config.kernels.tuning,
        cuda_graph_max_batch=config.cuda_graphs.max_batch,
        attention_backend="fixed_order" if config.deterministic else config.attention_backend,
        shared_prefix_attention=not config.deterministic,
        deterministic=config.deterministic,
        kernels_wait=config.kernels.wait,
        threads=_threads(config, place),
        structured_output=config.structured_output.on and place.rank == 0,
        host_cache_gb=config.host_cache.gb if config.prefix_cache.on else 0.0,
        host_cache_ratio=config.tier_ratio if config.prefix_cache.on else 0.0,
        share_host_cache=config.shares_host_cache,
        micro_batches=config.pipeline_parallel.micro_batches,
        lora_slots=config.lora_slots.slots,
        lora_rank=config.lora_slots.rank,
        pictures=config.pictures.on and not config.deterministic,
        picture_cache_bytes=int(config.pictures.cache_mb * 2**20),
        picture_host_bytes=0 if device == "cpu" else int(config.pictures.host_mb * 2**20),
        most_picture_bytes=int(config.pictures.max_mb * 2**20),
    )


def _resolve_drafter(config: WorkerConfig, model: str) -> Path:
    """The files of a draft model or a head, fetched if need be."""
    try:
        return resolve_model(model, weights=config.load_format != "dummy", progress=logged(logger))
    except ConfigError as error:
        raise ConfigError(f"--speculate: {str(error).removeprefix('--model: ')}") from error


def _draft_options(config: WorkerConfig, options: RunnerOptions, model: str) -> RunnerOptions:
    """What a draft model is made of."""
    path = _resolve_drafter(config, model)
    if encoder_family(path) is not None or (path.is_dir() and classifies(path)):
        raise ConfigError(f"--speculate draft:{model}: it generates nothing")
    if read_config(path)[1].state_layers:
        raise ConfigError(f"--speculate draft:{model}: it has layers that keep states, which cannot go back")
    return RunnerOptions(
        model_path=path,
        load_format=options.load_format,
        device=options.device,
        dtype=options.dtype,
        page_size=options.page_size,
        memory_fraction=options.memory_fraction,
        max_step_tokens=options.max_step_tokens,
        cuda_graphs=options.cuda_graphs,
        cuda_graph_max_batch=options.cuda_graph_max_batch,
        kernels_wait=options.kernels_wait,
        threads=options.threads,
        pictures=False,
    )


def _meet(config: WorkerConfig, place: Place, device: str) -> Parallel:
    """The groups, once all ranks have come."""
    if place.size == 1:
        return Parallel()
    parallel = join_groups(
        place.rank,
        tensor=config.tensor_parallel,
        pipeline=config.pipeline_parallel.stages,
        expert=config.tensor_parallel if config.expert_parallel.on else 1,
        rendezvous=place.rendezvous,
        backend="gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
        timeout=_EXCHANGE_SECONDS if place.rank or place.nodes > 1 else _MEETING_SECONDS,
        exchange_timeout=_EXCHANGE_SECONDS,
        listener=place.listener,
        waits=place.waits,
    )
    rows = DataParallelRows(parallel.tp, device_ops(device)) if config.data_parallel_attention else None
    parallel = replace(
        parallel,
        redundant_experts=config.expert_parallel.redundant,
        rows=rows,
        dispatch=config.expert_parallel.dispatch,
    )
    if config.expert_parallel.redundant:
        # NCCL connects at its first use, so the first transfer would otherwise take far longer than the others.
        parallel.ep.connect(torch.device(device))
    choose_sums(parallel, config.all_reduce, torch.device(device), place.on_node, _EXCHANGE_SECONDS)
    return parallel


def _threads(config: WorkerConfig, place: Place) -> int | None:
    """CPU threads of a rank; None: torch's own choice."""
    if place.size == 1:
        return config.threads or None
    return max(1, (config.threads or torch.get_num_threads()) // place.on_node)
