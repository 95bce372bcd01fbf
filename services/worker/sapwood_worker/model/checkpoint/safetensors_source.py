"""Weights of a Hugging Face directory: ``model.safetensors``, or shards named by ``model.safetensors.index.json``.

Where there are none, ``pytorch_model.bin`` or its shards are read.

Weights stored in float8 go into a float8 slot as they are. For another slot they are widened as they are read, times their
``weight_scale`` (one in all, one for each row or block) or ``weight_scale_inv``, DeepSeek's name for the scales of blocks of
128 x 128.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sapwood_common.errors import ConfigError
from sapwood_common.models.json_file import read_json_object
from sapwood_common.models.wanted import INDEX, SINGLE, TORCH_INDEX, TORCH_SINGLE, is_shard_name
from sapwood_worker.model.checkpoint.torch_file import TorchFile
from sapwood_worker.model.checkpoint.weights import BLOCK, Place, places
from sapwood_worker.model.families.family import FusedRows, ModelFamily
from sapwood_worker.model.weight_slot import StoredTensor, WeightSlot

# Constants that some old checkpoints store, scales of activations, which we compute ourselves, and those of the cache.
_IGNORED_SUFFIXES = (
    *(".rotary_emb.inv_freq", ".input_scale", ".activation_scale", ".input_zero_point", ".input_global_scale"),
    *(".output_scale", ".q_scale", ".k_scale", ".v_scale"),
    *(".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias"),  # masks of GPTs
    *(".slope_rate", ".query_decay", ".key_decay", ".diagonal_decay"),
)
_BARE = {"layers.": "model.layers.", "embed_tokens.": "model.embed_tokens.", "norm.": "model.norm."}
"""Names of files that hold a model without a head, as embedding models are published."""
_DRAFTS = ("mtp.", "model.mtp.", "model.mtp_", "mtp_")
"""How names of tensors begin that serve for drafts alone."""
_KV_SCALE = re.compile(
    r".*layers\.([0-9]{1,6})\.self_attn\.(?:attn\.)?([kv])(?:_scale|_proj\.(?:[kv]_scale|output_scale))"
)
_WIDE = (torch.float32, torch.bfloat16, torch.float16)


class SafetensorsSource:
    """Implements :class:`sapwood_worker.model.checkpoint.weights.WeightSource`.

    Args:
        directory: Holds the files, or is one.
        family: The model's family.
        tied: Whether the output head is the embedding; a stored copy of it is then ignored.
        skipped: How further names begin that are not read.
        fused: Projections that are stored as one tensor, as ``ModelFamily.fused`` has them.
        groups: In how many parts of such a tensor each projection lies.

    Raises:
        ConfigError: No such files, or one is damaged or missing.
    """

    def __init__(
        self,
        directory: Path,
        family: ModelFamily,
        *,
        tied: bool,
        skipped: tuple[str, ...] = (),
        fused: FusedRows | None = None,
        groups: int = 1,
    ) -> None:
        self._files: dict[Path, Any] = {}
        # Our name -> where it lies.
        self._found: dict[str, Place] = {}
        # Our name of a weight -> that of its scales.
        self._scales: dict[str, str] = {}
        # By layer and what is scaled, the file of a cache's scale and its name there.
        self._kv_scales: dict[tuple[int, Literal["k", "v"]], tuple[Path, str]] = {}
        self._directory = directory
        shards = checkpoint_shards(directory)
        for path in checkpoint_files(directory):
            self._files[path] = open_weights(path)
            for stored in self._files[path].keys():  # noqa: SIM118  (not a mapping)
                if shards.get(stored, path) != path:  # the index names another file
                    continue
                if found_scale := _KV_SCALE.fullmatch(stored):
                    self._kv_scales[int(found_scale[1]), "k" if found_scale[2] == "k" else "v"] = path, stored
                if stored.startswith(family.skipped + skipped) or stored.endswith(_IGNORED_SUFFIXES):
                    continue
                prefixes = family.prefixes if stored.startswith(tuple(family.prefixes)) else _BARE
                prefix = next((each for each in prefixes if stored.startswith(each)), "")
                name = prefixes.get(prefix, "") + stored.removeprefix(prefix)
                for theirs, own in family.renamed.items():
                    name = f".{name}.".replace(f".{theirs}.", f".{own}.", 1)[1:-1]
                if name.startswith(_DRAFTS + skipped) or (tied and name == "lm_head.weight"):
                    continue
                form: dict[str, Any] = {"by_rows": family.by_rows, "groups": groups, "transposed": family.transposed}
                for ours, place in places(name, path, stored, fused or {}, **form):
                    self._found[ours] = place
                    weight, found, suffix = ours.rpartition("_scale")
                    if found and weight.endswith(".weight") and suffix in ("", "_inv"):
                        self._scales[weight] = ours

    def tensors(self) -> dict[str, StoredTensor]:
        result = {}
        for name, place in self._found.items():
            found = self._files[place.path].get_slice(place.stored)
            shape = tuple(found.get_shape())
            if place.transposed:
                shape = shape[::-1]
            part = place.part(shape)
            if part is not None:
                dim, span = part
                shape = (*shape[:dim], span.size, *shape[dim + 1 :])
            result[name] = StoredTensor(shape, found.get_dtype(), scales=name in self._scales.values())
        return result

    def hashes(self) -> dict[str, bytes]:
        """By its name in the files, xxh3-128 of each tensor's bytes. Reads all of them."""
        found: dict[str, bytes] = {}
        for file in self._files.values():
            for stored in file.keys():  # noqa: SIM118  (not a mapping)
                content = file.get_tensor(stored).contiguous().reshape(-1).view(torch.uint8).numpy()
                found[stored] = xxhash.xxh3_128_digest(content)
        return found

    def drop(self, *prefixes: str) -> None:
        """Forgets the tensors whose names begin so."""
        self._found = {name: place for name, place in self._found.items() if not name.startswith(prefixes)}

    def read(self, name: str) -> Tensor:
        """A whole tensor as it is stored. Raises ConfigError if it cannot be read."""
        try:
            return self._read(name)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{self._found[name].path}: tensor {name} cannot be read: {error}") from error

    def stored_name(self, name: str) -> str:
        if name in self._found:
            return self._found[name].stored
        inner = name.removeprefix("model.")
        for ours, place in self._found.items():
            own = ours.removeprefix("model.")
            if ours.startswith("model.layers.") and place.stored.endswith(own):
                return place.stored.removesuffix(own) + inner if inner != name else name
        return name

    def where(self, name: str) -> str:
        return str(self._found[name].path if name in self._found else self._directory)

    def read_into(self, name: str, slot: WeightSlot) -> None:
        place = self._found[name]
        try:
            tensor = self._part(name, slot.index) if slot.is_part else self._read(name)
            if name in self._scales and slot.target.dtype in _WIDE:
                tensor = _widened(tensor, self._read(self._scales[name]), slot)
            slot.target.copy_(tensor)
        except (OSError, SafetensorError, ValueError) as error:
            raise ConfigError(f"{place.path}: tensor {place.stored} cannot be read: {error}") from error

    def kv_scales(self) -> dict[int, tuple[float, float]]:
        """The factors of a float8 cache's keys and values, of the layers that the checkpoint stores both for.

        Raises:
            ConfigError: One is no positive number; names it and the file.
        """
        return {
            layer: (self._kv_scale(layer, "k"), self._kv_scale(layer, "v"))
            for layer, kind in sorted(self._kv_scales)
            if kind == "k" and (layer, "v") in self._kv_scales
        }

    def _kv_scale(self, layer: int, kind: Literal["k", "v"]) -> float:
        path, stored = self._kv_scales[layer, kind]
        tensor: Tensor = self._files[path].get_tensor(stored).float()
        if tensor.numel() != 1 or not 0 < tensor.item() < float("inf"):
            raise ConfigError(f"{path}: tensor {stored} {list(tensor.shape)}: a layer's cache has one scale, above 0")
        return tensor.item()

    def _read(self, name: str) -> Tensor:
        place = self._found[name]
        if place.rows is not None or place.rearranged:
            return self._part(name, None)
        tensor: Tensor = self._files[place.path].get_tensor(place.stored)
        return tensor

    def _part(self, name: str, index: tuple[slice, ...] | None) -> Tensor:
        """A part of a tensor, or all that is ours of a stored one."""
        place = self._found[name]
        if place.rearranged:
            ours_whole = place.take(self._files[place.path].get_tensor(place.stored))
            return ours_whole if index is None else ours_whole[index]
        stored = self._files[place.path].get_slice(place.stored)
        shape = stored.get_shape()
        part = place.part(shape)
        if part is not None:
            dim, span = part
            index = index or tuple(slice(0, span.size if at == dim else size) for at, size in enumerate(shape))
            ours = slice(span.start + index[dim].start, span.start + index[dim].stop)
            index = (*index[:dim], ours, *index[dim + 1 :])
        tensor: Tensor = self._files[place.path].get_tensor(place.stored) if index is None else stored[index]
        return tensor


def checkpoint_files(directory: Path) -> list[Path]:
    """The files with the weights of a directory, or the one that it is.

    Raises:
        ConfigError: There are none, or the index is broken.
    """
    if directory.is_file():
        return [directory]
    shards = checkpoint_shards(directory)
    if shards:
        return sorted(set(shards.values()))
    for name in (SINGLE, TORCH_SINGLE):
        if (directory / name).exists():
            return [directory / name]
    raise ConfigError(f"{directory}: holds neither {SINGLE} nor {INDEX}, and no {TORCH_SINGLE}")


def checkpoint_shards(directory: Path) -> dict[str, Path]:
    """The file of each tensor, as the index of a directory has it; empty: there is no index.

    Raises:
        ConfigError: The index is broken, or names a file that is not in the directory.
    """
    index = directory / INDEX
    if not index.exists() and not (directory / SINGLE).exists():
        index = directory / TORCH_INDEX
    if not index.exists():
        return {}
    shards = read_json_object(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ConfigError(f"{index}: holds no weight_map")
    for tensor, name in shards.items():
        if not isinstance(name, str) or not is_shard_name(name):
            raise ConfigError(
                f"{index}: weight_map.{tensor} is {name!r:.100}; it can be the name of a file with weights beside the index"
            )
    return {tensor: directory / name for tensor, name in shards.items()}


def open_weights(path: Path) -> Any:
    """Maps a file of safetensors or of torch's, which is closed with the object; nothing is read but its header.

    Raises:
        ConfigError: It is no such file, or damaged; names it.
    """
    if path.exists() and not path.is_file():  # a pipe would keep us waiting
        raise ConfigError(f"{path}: is no file")
    if path.suffix == ".bin":
        return TorchFile(path)
    try:
        return safe_open(path, framework="pt")
    except Exception as error:  # the library's own, and any that its header's numbers lead to
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def _widened(weight: Tensor, scales: Tensor, slot: WeightSlot) -> Tensor:
    """The slot's part of a float8 weight [N, K] times its scales: one in all, [N] or [N, 1], or one for each 128 x 128.

    Raises:
        ValueError: The scales are of another shape.
    """
    scales = scales.float()
    rows, columns = slot.shape
    if scales.numel() == 1:
        return weight.float() * scales.view(())
    if scales.shape in ((rows,), (rows, 1)):
        return weight.float() * scales.view(-1, 1)[slot.index[0]]
    if scales.shape != (-(-rows // BLOCK), -(-columns // BLOCK)):
        raise ValueError(f"its scales have shape {list(scales.shape)}")
    each = scales.repeat_interleave(BLOCK, 0)[slot.index[0]].repeat_interleave(BLOCK, 1)[:, slot.index[1]]
    return weight.float() * each
