"""Makes a checkpoint in few bits of one in many, and writes it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from sapwood_common.errors import ConfigError
from sapwood_common.models.progress import Progress
from sapwood_kernels.ops.device import DeviceOps
from sapwood_kernels.ops.factory import device_ops
from sapwood_worker.model.checkpoint.hf_config import read_hf_quantization
from sapwood_worker.model.checkpoint.safetensors_source import checkpoint_files, open_weights
from sapwood_worker.model.layers.linear import Linear
from sapwood_worker.model.layers.sparse.experts import Experts
from sapwood_worker.model.layers.sparse.sparse_mlp import Router
from sapwood_worker.model.loader import LoadedModel, load_model
from sapwood_worker.model.quantization.dense import DenseMethod
from sapwood_worker.model.quantizer.layers import LayerRun
from sapwood_worker.model.quantizer.schemes import Scheme
from sapwood_worker.model.runner.options import DTYPES

# Writes a checkpoint: safetensors in files of a few gigabytes, their index, and what else its folder holds.


_SHARD_BYTES = 4 << 30
_INDEX = "model.safetensors.index.json"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


class CheckpointWriter:
    """A folder that has its name once it is whole. What a killed process left of it is removed.

    Args:
        folder: Must not exist.

    Raises:
        ConfigError: Another process is writing it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._unfinished = folder.with_name(f".{folder.name}.unfinished")
        self._unfinished.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self._unfinished, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise ConfigError(f"{folder}: another process is writing it") from None
        for left in self._unfinished.iterdir():
            left.unlink()
        self._held: dict[str, Tensor] = {}
        self._shards: list[list[str]] = []
        self._bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Adds a tensor; a file is written when there is enough for one."""
        if self._held and sum(each.nbytes for each in self._held.values()) + tensor.nbytes > _SHARD_BYTES:
            self._write()
        self._held[name] = tensor.detach().to("cpu").contiguous().clone()

    def finish(self, source: Path, changes: dict[str, Any]) -> None:
        """Writes the remaining tensors, the configuration with these changes, and copies of the source's other files."""
        self._write()
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards, 1):
            file = "model.safetensors" if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
            (self._unfinished / f"{number}.part").rename(self._unfinished / file)
            weight_map |= dict.fromkeys(names, file)
        if count > 1:
            index = {"metadata": {"total_size": self._bytes}, "weight_map": weight_map}
            (self._unfinished / _INDEX).write_text(json.dumps(index, indent=1))
        for file_ in source.iterdir():
            if file_.is_file() and file_.suffix not in _WEIGHTS and file_.name not in ("config.json", _INDEX):
                shutil.copy(file_, self._unfinished / file_.name)
        config = json.loads((source / "config.json").read_text()) | changes
        (self._unfinished / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        self._unfinished.rename(self._folder)

    def abandon(self) -> None:
        """Removes what was written, unless it is finished, and lets others write."""
        shutil.rmtree(self._unfinished, ignore_errors=True)
        os.close(self._lock)

    def _write(self) -> None:
        if self._held:
            self._shards.append(list(self._held))
            self._bytes += sum(each.nbytes for each in self._held.values())
            try:
                save_file(self._held, self._unfinished / f"{len(self._shards)}.part", metadata={"format": "pt"})
            except SafetensorError as error:  # the disk is full, say
                raise OSError(errno.EIO, str(error), str(self._folder)) from error
            self._held = {}


_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Quantized:
    """The result of quantising a model.

    Attributes:
        before: Perplexity of the measured text; None: there is none.
        after: That of the new checkpoint, read again as a worker reads it.
        wide: Linear layers that the scheme cannot hold, which stay as they were.
    """

    before: float | None
    after: float | None
    wide: list[str]


@torch.inference_mode()
def quantize(
    source: Path,
    target: Path,
    scheme: Scheme,
    *,
    calibration: Sequence[Sequence[int]],
    measured: Sequence[Sequence[int]],
    device: str,
    threads: int,
    progress: Progress,
) -> Quantized:
    """Writes a quantised copy of a checkpoint.

    Args:
        source: A Hugging Face directory.
        target: The new one.
        scheme: How linear layers are stored; embedding, norms and output head are copied.
        calibration: Token ids of texts by whose inputs weights are rounded; empty: to the nearest.
        measured: The tokens of texts whose perplexity is reported; each text has at least two tokens.
        device: Where it is computed, as torch names it.
        threads: Tensors read at once.
        progress: Told how far it is.

    Raises:
        ConfigError: The source cannot be read or is quantised, or the target is there.
    """
    check_paths(source, target)
    loaded, dtype, ops = _load(source, device, threads)
    if loaded.config.sparse is not None and loaded.config.sparse.joined is not None:
        raise ConfigError(f"{source}: experts that are stored joined cannot be quantised")
    _check_names(source, loaded)
    whole = perplexity(loaded, measured, dtype, ops.device)
    run = LayerRun(loaded, calibration, dtype, ops.device)
    writer = CheckpointWriter(target)
    try:
        wide = _Rounding(loaded, scheme, run, writer, _scales_dtype(source), progress).all_layers()
        _copy_others(source, loaded, writer, set(wide))
        writer.finish(source, {"quantization_config": scheme.configuration(["lm_head", *_routers(loaded), *wide])})
    finally:
        writer.abandon()
    del run, loaded
    return Quantized(whole, perplexity_of(target, measured, device, threads), wide)


def check_paths(source: Path, target: Path) -> None:
    """Raises ConfigError unless the source is a directory whose weights are not quantised, and nothing is at the target."""
    if not source.is_dir():
        raise ConfigError(f"{source}: only Hugging Face directories can be quantised; a .gguf file is served as it is")
    if read_hf_quantization(source):
        raise ConfigError(f"{source}: config.json says that it is quantised")
    if target.exists():
        raise ConfigError(f"{target} is there already")


def _load(path: Path, device: str, threads: int) -> tuple[LoadedModel, torch.dtype, DeviceOps]:
    ops = device_ops(device)
    ops.joins_shared = False  # all that is to be rounded is a layer
    dtype = DTYPES[ops.default_dtype]
    return load_model(path, "auto", dtype, ops, context_length=None, threads=threads, seed=0), dtype, ops


@torch.inference_mode()
def perplexity_of(path: Path, pieces: Sequence[Sequence[int]], device: str, threads: int) -> float | None:
    """The perplexity over texts of the model in a directory or a ``.gguf`` file; None: there are no texts.

    Raises:
        ConfigError: The model cannot be read.
    """
    if not pieces:
        return None
    loaded, dtype, ops = _load(path, device, threads)
    return perplexity(loaded, pieces, dtype, ops.device)


def perplexity(
    loaded: LoadedModel, pieces: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
) -> float | None:
    """A model's perplexity over texts; None: there are none."""
    if not pieces:
        return None
    run = LayerRun(loaded, pieces, dtype, device)
    for index in range(loaded.config.num_layers):
        run.advance(index)
    return run.perplexity()


class _Rounding:
    """The layers' way into the new checkpoint."""

    def __init__(
        self,
        loaded: LoadedModel,
        scheme: Scheme,
        run: LayerRun,
        writer: CheckpointWriter,
        scales_dtype: torch.dtype,
        progress: Progress,
    ) -> None:
        self._loaded, self._scheme, self._run = loaded, scheme, run
        self._writer, self._scales_dtype, self._progress = writer, scales_dtype, progress
        self._done = 0

    def all_layers(self) -> list[str]:
        """Writes all layers; returns the names of those that the scheme cannot hold."""
        wide: list[str] = []
        for index, layer in enumerate(self._loaded.model.layers):
            linears = [each for each in layer.modules() if isinstance(each, Linear)]
            moments, of_experts = (
                self._run.watch(index) if self._scheme.group is not None and self._run.has_text else ({}, {})
            )
            for linear in linears:
                if self._scheme.fits(linear.shape.columns.size):
                    self._round(linear, moments.get(linear))
                else:
                    wide += [part.name for part in linear.shape.parts]
                self._done += linear.shape.rows * linear.shape.columns.size
                self._progress("quantising", 2 * self._done, 2 * self._loaded.model.layer_size())
            for name, weight in _expert_weights(layer).items():
                if self._scheme.fits(weight.shape[1]):
                    self._round_expert(name, weight, of_experts.get(name))
                else:
                    wide.append(name)
                self._done += weight.numel()
                self._progress("quantising", 2 * self._done, 2 * self._loaded.model.layer_size())
            self._run.advance(index)
        return wide

    def _round(self, linear: Linear, moments: torch.Tensor | None) -> None:
        method = linear.method
        assert isinstance(method, DenseMethod)
        rounded = self._scheme.round(method.weight.float(), moments, self._scales_dtype)
        start = 0
        for part in linear.shape.parts:
            rows = slice(start, start + part.rows.size)
            for kind, tensor in rounded.tensors.items():
                shape = torch.tensor([part.rows.size, linear.shape.columns.size])
                self._writer.add(f"{part.name}.{kind}", shape if kind == "weight_shape" else tensor[rows])
            start = rows.stop
        method.weight.copy_(rounded.numbers)
        method.finish()  # a device may hold the weight in another layout, too

    def _round_expert(self, name: str, weight: torch.Tensor, moments: torch.Tensor | None) -> None:
        """Rounds a projection in its place among the others of its layer."""
        rounded = self._scheme.round(weight.float(), moments, self._scales_dtype)
        for kind, tensor in rounded.tensors.items():
            self._writer.add(f"{name}.{kind}", tensor)
        weight.copy_(rounded.numbers)


def _expert_weights(layers: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The projections of experts, by name: views."""
    experts = (each for each in layers.modules() if isinstance(each, Experts))
    return {name.removesuffix(".weight"): slot.target for each in experts for name, slot in each.slots().items()}


def _routers(loaded: LoadedModel) -> list[str]:
    """The names of the layers that choose experts: numbers, though libraries take them for linear layers."""
    routers = (each for each in loaded.model.layers.modules() if isinstance(each, Router))
    return [name.removesuffix(".weight") for each in routers for name in each.slots() if name.endswith(".weight")]


def _copy_others(source: Path, loaded: LoadedModel, writer: CheckpointWriter, wide: set[str]) -> None:
    """Copies the tensors that are not quantised, as they are stored."""
    rounded = {f"{name}.weight" for name in _projections(loaded) if name not in wide}
    for path in checkpoint_files(source):
        with open_weights(path) as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                if name not in rounded:
                    writer.add(name, file.get_tensor(name))


def _projections(loaded: LoadedModel) -> list[str]:
    linears = (each for each in loaded.model.layers.modules() if isinstance(each, Linear))
    return [part.name for linear in linears for part in linear.shape.parts] + list(_expert_weights(loaded.model.layers))


def _check_names(source: Path, loaded: LoadedModel) -> None:
    names: set[str] = set()
    for path in checkpoint_files(source):
        with open_weights(path) as file:
            names |= set(file.keys())
    other = sorted(name for name in _projections(loaded) if f"{name}.weight" not in names)
    if other:
        raise ConfigError(
            f"{source}: tensor {other[0]}.weight goes by another name; only plain language models can be quantised"
        )


def _scales_dtype(source: Path) -> torch.dtype:
    """The dtype of the weights if it has 16 bits, else float32."""
    with open_weights(checkpoint_files(source)[0]) as file:
        found = {file.get_tensor(name).dtype for name in list(file.keys())[:1]}
    return next((dtype for dtype in _HALVES if dtype in found), torch.float32)
