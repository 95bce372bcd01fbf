"""Reads the header of a GGUF file (versions 2 and 3): metadata and where each tensor lies.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Reading is one pass over the header, O(header bytes); tensor
data stays in the memory map until someone slices it. (``gguf.GGUFReader`` builds a numpy view for every metadata element
and takes 15 s for Gemma's 262 144-entry vocabulary; this takes under half a second.)
"""

from __future__ import annotations

import contextlib
import math
import mmap
import struct
from array import array
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sapwood_common.models.gguf_parts import part_names

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_MOST_DIMS = 8
_MOST_NUMBERS = 1 << 48
_MOST_ELEMENTS = 1 << 24
_LONGEST_NAME = 65_535  # the format's bound of a key; no tensor's name and no token comes near
_LONGEST_STRING = 1 << 24  # templates and tokenizer files are the longest there are
_SIZE = struct.Struct("<Q")
# Value type -> (struct code, size in bytes).
_SCALARS = {
    0: ("B", 1), 1: ("b", 1), 2: ("H", 2), 3: ("h", 2), 4: ("I", 4), 5: ("i", 4),
    6: ("f", 4), 7: ("?", 1), 10: ("Q", 8), 11: ("q", 8), 12: ("d", 8),
}  # fmt: skip


class GgufError(Exception):
    """The file is not a GGUF file that can be read; the message names the file and the reason."""


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies in the file.

    Attributes:
        name: Its name in the file, such as ``blk.0.attn_q.weight``.
        shape: Its shape in torch's order, slowest dimension first.
        type: Its ggml quantisation type number (``gguf.GGMLQuantizationType``).
        offset: Byte offset of its data from the start of the file.
        part: Which of the model's files that is, from 0.
    """

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int
    part: int = 0


class GgufFile:
    """An open GGUF file, with the others of its model where that is stored in several.

    Attributes:
        paths: The files; the first has all metadata.
        metadata: Key to value; strings are str, numeric arrays are lists, string arrays are lists of str.
        tensors: Name to tensor, in file order.

    Args:
        path: The file, or the first of several; they stay mapped until :meth:`close`.

    Raises:
        GgufError: The file is missing, truncated, of another format or of an unsupported version.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        mapped, self.metadata, self.tensors = _open(self.path)
        self.paths, self._maps = [self.path], [mapped]
        count = _whole(self.metadata, "split.count", 1, self.path)
        if count > 1:
            self._open_others(count)

    def _open_others(self, count: int) -> None:
        names = part_names(self.path.name)
        if _whole(self.metadata, "split.no", 0, self.path):
            raise GgufError(f"{self.path}: is one of {count} files of a model, whose first is to be named: {names[0]}")
        if len(names) != count:
            raise GgufError(
                f"{self.path}: is the first of {count} files, but is not called NAME-00001-of-{count:05}.gguf"
            )
        for number, name in enumerate(names[1:], 1):
            path = self.path.with_name(name)
            mapped, _, tensors = _open(path)
            self.paths.append(path)
            self._maps.append(mapped)
            self.tensors |= {each: replace(tensor, part=number) for each, tensor in tensors.items()}

    def data(self, tensor: GgufTensor, size: int) -> memoryview:
        """The raw bytes of a tensor, ``size`` long, valid until :meth:`close`.

        Raises:
            GgufError: The file ends before the tensor does.
        """
        mapped = self._maps[tensor.part]
        if size < 0 or tensor.offset + size > len(mapped):
            path = self.paths[tensor.part]
            raise GgufError(f"{path}: truncated: tensor {tensor.name} ends beyond the end of the file")
        return memoryview(mapped)[tensor.offset : tensor.offset + size]

    def close(self) -> None:
        """Unmaps the files and forgets their metadata: a vocabulary's are 30 MB. No view from :meth:`data` may be in use, but by
        an error on its way: the memory is then unmapped with it, so that who reads the error learns what it was."""
        for mapped in self._maps:
            with contextlib.suppress(BufferError):
                mapped.close()
        self.metadata = {}


def _open(path: Path) -> tuple[mmap.mmap, dict[str, Any], dict[str, GgufTensor]]:
    """Maps a file and reads its header."""
    try:
        if path.exists() and not path.is_file():  # a pipe would keep us waiting
            raise GgufError(f"{path}: is no file")
        if path.stat().st_size == 0:
            raise GgufError(f"{path}: is empty")
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise GgufError(f"{path}: cannot be read: {error}") from error
    try:
        return mapped, *_Parser(mapped).parse()
    except GgufError as error:
        mapped.close()
        raise GgufError(f"{path}: {error}") from None
    except (struct.error, LookupError, ValueError, ArithmeticError, TypeError, RecursionError, MemoryError) as error:
        mapped.close()
        raise GgufError(f"{path}: damaged or truncated header ({error})") from error


def _whole(metadata: dict[str, Any], key: str, default: int, path: Path) -> int:
    """A whole number of the metadata. Raises GgufError if it is none."""
    value = metadata.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise GgufError(f"{path}: {key} is {value!r:.60}; it can be a whole number")
    return value


class _Parser:
    def __init__(self, raw: mmap.mmap) -> None:
        self._raw = raw
        self._at = 0

    def parse(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        if self._raw[:4] != _MAGIC:
            raise GgufError("not a GGUF file")
        self._at = 4
        version = self._scalar("I", 4)
        if version not in (2, 3):
            raise GgufError(f"GGUF version {version} is not supported (2 and 3 are)")
        tensor_count, key_count = self._scalar("Q", 8), self._scalar("Q", 8)
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._string(_LONGEST_NAME)
            if key in metadata:
                raise GgufError(f"key {key!r:.100} is there twice")
            metadata[key] = self._value(self._scalar("I", 4))
        found: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(tensor_count):
            name = self._string(_LONGEST_NAME)
            if (dims := self._scalar("I", 4)) > _MOST_DIMS:
                raise GgufError(f"tensor {name!r:.100} has {dims} dimensions; at most {_MOST_DIMS} can be read")
            shape = tuple(self._scalar("Q", 8) for _ in range(dims))
            if math.prod(shape) > _MOST_NUMBERS:
                raise GgufError(f"tensor {name!r:.100} of shape {list(shape[::-1])} is larger than any file")
            found.append((name, shape[::-1], self._scalar("I", 4), self._scalar("Q", 8)))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or isinstance(alignment, bool) or alignment < 1:
            raise GgufError(f"general.alignment is {alignment!r:.60}; it can be a whole number from 1 on")
        names = [name for name, *_ in found]
        if len(set(names)) < len(names):
            (twice, _), *_ = Counter(names).most_common(1)
            raise GgufError(f"tensor {twice!r:.100} is there twice")
        start = -(-self._at // alignment) * alignment
        return metadata, {name: GgufTensor(name, shape, kind, start + at) for name, shape, kind, at in found}

    def _scalar(self, code: str, size: int) -> Any:
        (value,) = struct.unpack_from("<" + code, self._raw, self._at)
        self._at += size
        return value

    def _string(self, most: int = _LONGEST_STRING) -> str:
        size = self._scalar("Q", 8)
        end = self._at + size
        if end > len(self._raw):
            raise IndexError("string beyond the end of the file")
        if size > most:  # bytes that are no text are decoded one after the other: seconds for a hundred million
            raise GgufError(f"a string of {size} bytes at byte {self._at}; at most {most} can be read")
        # Vocabularies may hold bytes that are no text; surrogateescape keeps them.
        text = self._raw[self._at : end].decode("utf-8", "surrogateescape")
        self._at = end
        return text

    def _strings(self, count: int) -> list[str]:
        """The next ``count`` strings, in a third of the time of as many calls of :meth:`_string`: vocabularies are long."""
        raw, at, size_at = self._raw, self._at, _SIZE.unpack_from
        strings: list[str] = []
        add = strings.append
        for _ in range(count):
            (size,) = size_at(raw, at)
            at += _SIZE.size
            end = at + size
            text = raw[at:end]
            if len(text) < size or size > _LONGEST_NAME:
                raise IndexError(
                    "string beyond the end of the file, or of more bytes than an entry of a vocabulary has"
                )
            add(text.decode("utf-8", "surrogateescape"))
            at = end
        self._at = at
        return strings

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            inner, count = self._scalar("I", 4), self._scalar("Q", 8)
            if count > _MOST_ELEMENTS:
                raise GgufError(f"an array of {count} elements is longer than any vocabulary")
            if inner == _STRING:
                return self._strings(count)
            if inner == _ARRAY:
                return [self._value(inner) for _ in range(count)]
            code, size = _SCALARS[inner]
            end = self._at + size * count
            if end > len(self._raw):
                raise IndexError("array beyond the end of the file")
            if code == "?":
                values: list[Any] = [byte != 0 for byte in self._raw[self._at : end]]
            else:
                values = array(code, self._raw[self._at : end]).tolist()
            self._at = end
            return values
        code, size = _SCALARS[kind]
        return self._scalar(code, size)
