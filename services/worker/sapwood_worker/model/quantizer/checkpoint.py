"""Writes a checkpoint: safetensors in files of a few gigabytes, their index, and what else its folder holds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

_SHARD_BYTES = 4 << 30
_INDEX = "model.safetensors.index.json"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


class CheckpointWriter:
    """A folder that has its name once it is whole.

    Args:
        folder: Must not exist.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._unfinished = folder.with_name(f".{folder.name}.unfinished")
        shutil.rmtree(self._unfinished, ignore_errors=True)
        self._unfinished.mkdir(parents=True)
        self._held: dict[str, Tensor] = {}
        self._shards: list[list[str]] = []
        self._bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Adds a tensor; a file is written when there is enough for one."""
        if self._held and sum(each.nbytes for each in self._held.values()) + tensor.nbytes > _SHARD_BYTES:
            self._write()
        self._held[name] = tensor.detach().to("cpu").contiguous().clone()

    def finish(self, source: Path, changes: dict[str, Any]) -> None:
        """Writes what is left, the configuration with these changes, and copies of the source's other files."""
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
        """Removes what was written, unless it is finished."""
        shutil.rmtree(self._unfinished, ignore_errors=True)

    def _write(self) -> None:
        if self._held:
            self._shards.append(list(self._held))
            self._bytes += sum(each.nbytes for each in self._held.values())
            save_file(self._held, self._unfinished / f"{len(self._shards)}.part", metadata={"format": "pt"})
            self._held = {}
