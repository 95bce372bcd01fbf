"""Loads a model from a path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from sapwood_common.errors import ConfigError
from sapwood_common.models.gguf_file import GgufError, GgufFile
from sapwood_kernels.experts.payload import RowShape
from sapwood_kernels.ops.contracts import GROUP
from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.checkpoint.generation_config import read_gguf_eos, read_hf_eos
from sapwood_worker.model.checkpoint.gguf_source import GgufSource, read_gguf_config, read_tensor
from sapwood_worker.model.checkpoint.hf_config import read_hf_config, read_hf_quantization
from sapwood_worker.model.checkpoint.safetensors_source import SafetensorsSource
from sapwood_worker.model.checkpoint.settled import check_sizes, settle
from sapwood_worker.model.checkpoint.weights import WeightSource, fill_dummy_weights, load_weights
from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.distributed.dispatch import choose_exchange
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.families.decoder import DecoderLayer, DecoderModel
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.values import ROPE_TENSORS
from sapwood_worker.model.layers.layer import LayerContext
from sapwood_worker.model.quantization.linear_method import LinearShape, Stored
from sapwood_worker.model.quantization.registry import AS_STORED, LinearMethods
from sapwood_worker.model.weight_slot import StoredTensor

LoadFormat = Literal["auto", "dummy"]
StoredWeights = Literal["keep", "widen"]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        model: The model, with its weights.
        config: The model's configuration.
        eos_token_ids: Its own end tokens.
        quantization: The formats of its linear layers other than the model's dtype, joined by ``+``; ``none``: there are none.
        family: Its family.
        rounds_head: Whether its output head was rounded as it was loaded.
        headless: Whether the checkpoint has no output head, so that the model makes embeddings alone.
        kv_scales: By layer the factors of a float8 cache's keys and values, where the checkpoint stores them.
    """

    model: DecoderModel
    config: ModelConfig
    eos_token_ids: tuple[int, ...]
    quantization: str
    family: ModelFamily
    rounds_head: bool = False
    kv_scales: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    headless: bool = False


def read_config(path: Path) -> tuple[ModelFamily, ModelConfig]:
    """The family and the configuration of a ``.gguf`` file or a Hugging Face directory, without its weights.

    Raises:
        ConfigError: It cannot be read or is not supported; names the file and what.
    """
    if path.is_dir():
        return read_hf_config(path)
    with closing(_open_gguf(path)) as file:
        return _read_gguf(file)


def load_model(
    path: Path,
    load_format: LoadFormat,
    dtype: torch.dtype,
    ops: DeviceOps,
    *,
    context_length: int | None,
    threads: int,
    seed: int,
    quantization: str = "none",
    stored_weights: StoredWeights = "keep",
    parallel: Parallel | None = None,
    adapted: bool = False,
) -> LoadedModel:
    """Loads a ``.gguf`` file or a Hugging Face directory.

    Args:
        path: The file or directory.
        load_format: ``dummy`` reads the configuration only and makes weights up: in float8 by blocks if it says that they are.
        dtype: The dtype of weights and activations.
        ops: The operations of the device, where the weights go.
        context_length: Lowers the configuration's ``max_position`` to this, if it is less.
        threads: Tensors read at once.
        seed: Seed of dummy weights.
        quantization: The format in which linear layers are quantised once they are loaded.
        stored_weights: ``keep`` keeps what the checkpoint stores in a format that we compute in on this device.
        parallel: The ranks that the model is split over; only this rank's part is read. None: it is not split.
        adapted: Whether linear layers may get adapters.

    Raises:
        ConfigError: It cannot be read or is not supported; names the file and what.
    """
    with ExitStack() as files:
        source: WeightSource | None = None
        kv_scales: Mapping[int, tuple[float, float]] = {}
        stored: Stored | None = None
        dummy = headless = False
        if path.is_dir():
            family, config = read_hf_config(path)
            eos = read_hf_eos(path, config.vocab_size)
            quantized = read_hf_quantization(path)
            if load_format == "dummy" and in_blocks(quantized):
                stored, dummy = Stored({}, quantized, str(path)), True
            elif load_format == "auto":
                fused, groups = family.fused(config), family.groups(config)
                source = safetensors = SafetensorsSource(path, family, tied=False, fused=fused, groups=groups)
                config, headless = settle(config, safetensors, path)
                kv_scales = safetensors.kv_scales()
                stored = Stored(source.tensors(), quantized, str(path))
        else:
            file = files.enter_context(closing(_open_gguf(path)))
            family, config = _read_gguf(file)
            eos = read_gguf_eos(file, config.vocab_size)
            if load_format == "auto":
                source = GgufSource(file, config, family)
                stored = Stored(source.tensors())
                check_sizes(config, stored.tensors, path, sum(each.stat().st_size for each in file.paths))
        if config.sparse is None and parallel is not None and parallel.ep.size > 1:
            raise ConfigError(f"--expert-parallel: {path} has no experts")
        config = _limited(config, context_length)
        linear = LinearMethods(
            quantization, dtype, ops, stored, widen=stored_weights == "widen", dummy=blocks_of if dummy else None
        )
        loaded: list[str] = []

        def load(index: int, layer: DecoderLayer) -> None:
            """Reads a layer before the next is built if layers are rounded: the model is never held wide."""
            if source is None or stored is None or quantization == "none" or quantization not in linear.used:
                return
            loaded.append(f"model.layers.{index}.")
            args = layer.weights(), source, config.norm_offset, threads
            load_weights(*args, inside=loaded[-1], stored=stored.tensors)
            del args  # what is rounded is let go
            with torch.inference_mode():
                layer.prepare()

        context = LayerContext(dtype, ops, linear, _exchanging(config, parallel, dtype, ops), adapted=adapted)
        with _numbers_of(path):
            model = DecoderModel(config, family.layer, context, load)
        kept = {name.removesuffix(AS_STORED) for name in linear.used - {"none"}}
        if quantization not in {"none"} | kept and kept:
            raise ConfigError(
                f"{path}: --quantization {quantization} would change nothing: the weights are {'+'.join(sorted(kept))}, "
                "and stay so unless --stored-weights is widen"
            )
        if source is None:
            fill_dummy_weights(model.weights(), seed)
        else:
            left = {name: slot for name, slot in model.weights().items() if not name.startswith(tuple(loaded))}
            load_weights(left, source, config.norm_offset, threads, (*model.elsewhere, *loaded))
    with torch.inference_mode(), _numbers_of(path):
        model.prepare()
    used = "+".join(sorted(linear.used - {"none"})) or "none"
    return LoadedModel(model, config, eos, used, family, linear.rounds_head, kv_scales, headless)


@contextmanager
def _numbers_of(path: Path) -> Iterator[None]:
    """Has numbers with which nothing can be computed be refused as the file's: a base of rotary positions of 1, say."""
    try:
        yield
    except (ArithmeticError, ValueError) as error:
        raise ConfigError(f"{path}: its settings have numbers that make no model: {error}") from error


def _read_gguf(file: GgufFile) -> tuple[ModelFamily, ModelConfig]:
    found = {name: file.tensors[name] for name in ROPE_TENSORS if name in file.tensors}
    divisors = {name: tuple(read_tensor(file, tensor).tolist()) for name, tensor in found.items()}
    family, config = read_gguf_config(file, divisors)
    return family, replace(config, norm_offset=0.0)  # these files hold the factor itself


def _exchanging(config: ModelConfig, parallel: Parallel | None, dtype: torch.dtype, ops: DeviceOps) -> Parallel:
    """The groups, with what takes rows to the ranks of their experts if that is asked for."""
    parallel = parallel or Parallel()
    if config.sparse is None or parallel.rows is None or parallel.dispatch == "gather":
        return parallel
    routing, float8 = config.sparse.routing, parallel.dispatch == "direct-float8"
    shape = RowShape(config.hidden_size, routing.chosen, routing.experts, dtype, float8)
    return replace(parallel, expert_exchange=choose_exchange(parallel.ep, parallel.rows, shape, ops))


def _limited(config: ModelConfig, context_length: int | None) -> ModelConfig:
    if context_length is None or context_length >= config.max_position:
        return config
    return replace(config, max_position=context_length)


def _open_gguf(path: Path) -> GgufFile:
    try:
        return GgufFile(path)
    except GgufError as error:
        raise ConfigError(str(error)) from error


def in_blocks(quantization: Mapping[str, Any]) -> bool:
    """Whether ``quantization_config`` says what DeepSeek-V3's does: float8 with a scale for each 128 x 128."""
    return quantization.get("quant_method") == "fp8" and quantization.get("weight_block_size") == [GROUP, GROUP]


def blocks_of(shape: LinearShape) -> dict[str, StoredTensor]:
    """The tensors that such a checkpoint has of a linear layer's projections, by name."""
    tensors = {}
    for part in shape.parts:
        sizes = part.rows.total, shape.columns.total
        scales = tuple(-(-size // GROUP) for size in sizes)
        tensors[f"{part.name}.weight"] = StoredTensor(sizes, "F8_E4M3")
        tensors[f"{part.name}.weight_scale_inv"] = StoredTensor(scales, "F32", scales=True)
    return tensors
