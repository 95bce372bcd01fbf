"""Memory of tensors on a CPU that is given back to the system, at unchanged addresses.

The system takes the pages of a tensor when the process says that nobody needs them (MADV_DONTNEED). They count as free memory at
once, and are zeros when they are touched again. So nothing that holds an address has to change.
Tensors smaller than a page, and the ends of others, stay.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

_DONT_NEED = 4
_libc = ctypes.CDLL(None, use_errno=True)


def storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """The memory of tensors on the CPU, each once, in their order."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.device.type == "cpu" and storage.nbytes():
            found.setdefault(storage.data_ptr(), storage)
    return list(found.values())


def release(memory: Iterable[torch.UntypedStorage]) -> int:
    """Gives memory back; what it holds is lost. Returns how many bytes.

    Raises:
        OSError: The system does not take it.
    """
    total = 0
    for storage in memory:
        page = mmap.PAGESIZE
        start = -(-storage.data_ptr() // page) * page
        size = (storage.data_ptr() + storage.nbytes()) // page * page - start
        if size <= 0:
            continue
        if _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _DONT_NEED):
            raise OSError(ctypes.get_errno(), "memory cannot be given back")
        total += size
    return total


def write(memory: Iterable[torch.UntypedStorage], path: Path) -> None:
    """Writes what memory holds into a file. Raises OSError if that cannot be."""
    with path.open("wb") as file:
        for view in _views(memory):
            file.write(view)


def read(memory: Iterable[torch.UntypedStorage], path: Path) -> None:
    """Reads what :func:`write` has written. Raises OSError if not all of it is there."""
    with path.open("rb", buffering=0) as file:
        for view in _views(memory):
            _fill(view, file)


def _fill(view: memoryview, file: FileIO) -> None:
    at = 0
    while at < len(view):
        count = file.readinto(view[at:])
        if not count:
            raise OSError("the file with the weights is too short")
        at += count


def _views(memory: Iterable[torch.UntypedStorage]) -> Iterator[memoryview]:
    for storage in memory:
        numbers = torch.empty(0, dtype=torch.uint8).set_(storage)
        yield memoryview(numbers.numpy())  # type: ignore[arg-type]
