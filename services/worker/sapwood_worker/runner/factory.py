"""Makes the runner that a worker's configuration asks for."""

from __future__ import annotations

import torch

from sapwood_common.errors import ConfigError
from sapwood_common.model_files import resolve_model
from sapwood_worker.config import WorkerConfig
from sapwood_worker.models.bert import is_bert
from sapwood_worker.runner.encoder_runner import EncoderRunner
from sapwood_worker.runner.model_runner import ModelRunner, RunnerOptions


def make_runner(config: WorkerConfig) -> ModelRunner | EncoderRunner:
    """Loads the model.

    Raises:
        ConfigError: It cannot be loaded, or there is no such device.
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device: no CUDA device is available here")
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    path = resolve_model(config.model)
    kind = EncoderRunner if is_bert(path) else ModelRunner
    return kind(
        RunnerOptions(
            model_path=path,
            load_format=config.load_format,
            device=device,
            dtype=config.dtype,
            page_size=config.page_size,
            num_pages=config.num_pages,
            kv_cache_bytes=None if config.kv_cache_gb is None else int(config.kv_cache_gb * (1 << 30)),
            quantization=config.quantization,
            kv_cache_dtype=config.kv_cache_dtype,
            memory_fraction=config.memory_fraction,
            max_step_tokens=config.max_step_tokens,
            context_length=config.context_length,
            max_running=config.max_running,
            threads=config.threads or None,
            structured_output=config.structured_output,
            host_cache_gb=config.host_cache_gb if config.prefix_cache else 0.0,
            host_cache_ratio=config.host_cache_ratio if config.prefix_cache else 0.0,
        )
    )
