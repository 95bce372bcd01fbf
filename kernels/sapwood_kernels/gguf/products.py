"""Products with matrices as GGUF files store them, on a CPU: ``products.c``, compiled when Sapwood is installed."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from pathlib import Path

import gguf
import torch
from torch import Tensor

from sapwood_kernels.gguf.build import library_name

logger = logging.getLogger(__name__)

TYPES = {
    kind.name: (kind.value, *gguf.GGML_QUANT_SIZES[kind])
    for kind in (
        gguf.GGMLQuantizationType.Q4_0,
        gguf.GGMLQuantizationType.Q4_1,
        gguf.GGMLQuantizationType.Q5_0,
        gguf.GGMLQuantizationType.Q5_1,
        gguf.GGMLQuantizationType.Q8_0,
        gguf.GGMLQuantizationType.Q4_K,
        gguf.GGMLQuantizationType.Q5_K,
        gguf.GGMLQuantizationType.Q6_K,
    )
}
"""The types that the library multiplies: ggml's number, numbers of a block and its bytes."""


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("type", ctypes.c_int64),
        ("first", ctypes.c_int64),
    )


class GgufLibrary:
    """The compiled library and the thread pool that it computes on.

    Args:
        path: The library.

    Raises:
        OSError: It is not there, or is not for this machine.
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        try:
            # torch's own pool: two pools on the same cores would wait for each other.
            run = ctypes.cast(ctypes.CDLL(None).GOMP_parallel, pointer).value
        except AttributeError:
            logger.warning("torch's thread pool is not GNU OpenMP's: products with GGUF's blocks take one thread")
            run = None
        self.run = run
        self.multiply = library.sapwood_gguf_multiply
        self.multiply.restype = None
        self.multiply.argtypes = (
            *(pointer, number, pointer, number, number, number),
            *(pointer, number, pointer, ctypes.c_uint),
        )
        self.rows = library.sapwood_gguf_rows
        self.rows.restype = number
        self.rows.argtypes = pointer, pointer, number, number, pointer, pointer, ctypes.c_uint


def load_library() -> GgufLibrary | None:
    """The library for this processor; None, with a line in the log that says why, where it was not compiled."""
    path = Path(__file__).parent / library_name(torch.backends.cpu.get_cpu_capability())
    try:
        return GgufLibrary(path)
    except OSError as error:
        logger.warning("GGUF weights are widened as they are loaded, no kernel for them: %s", error)
        return None


class GgufProduct:
    """``x @ weight.T`` for matrices of the same width as a GGUF file stores them, whose outputs lie side by side.

    Args:
        library: The compiled library.
        parts: For each matrix its type and its rows' bytes, uint8 [rows, bytes]; kept, not copied. Rows may lie apart.
        columns: Numbers in a row.
    """

    def __init__(self, library: GgufLibrary, parts: Sequence[tuple[str, Tensor]], columns: int) -> None:
        self._library = library
        self._parts = tuple(parts)
        self._columns = columns
        self._matrices = (_Matrix * len(parts))()
        self._outputs = 0
        for matrix, (kind, rows) in zip(self._matrices, parts, strict=True):
            number, per_block, block_bytes = TYPES[kind]
            if rows.dtype != torch.uint8 or rows.stride(1) != 1 or rows.shape[1] != columns // per_block * block_bytes:
                raise ValueError(f"rows of {columns} numbers in {kind} are not of shape {list(rows.shape)}")
            matrix.data, matrix.stride, matrix.rows = rows.data_ptr(), rows.stride(0), rows.shape[0]
            matrix.width, matrix.type, matrix.first = rows.shape[1], number, self._outputs
            self._outputs += rows.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        """Multiplies x: float32 [T, K] -> float32 [T, N]."""
        tokens = x.shape[0]
        result = torch.empty(tokens, self._outputs)
        if x.stride(1) != 1:
            x = x.contiguous()
        self._library.multiply(
            *(self._matrices, len(self._parts), x.data_ptr(), tokens, self._columns, x.stride(0)),
            *(result.data_ptr(), self._outputs, self._library.run, torch.get_num_threads()),
        )
        return result

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the first matrix: int64 [T] -> float32 [T, K].

        Raises:
            IndexError: There is no such row.
        """
        result = torch.empty(len(ids), self._columns)
        ids = ids.contiguous()
        bad = self._library.rows(
            *(self._matrices, ids.data_ptr(), len(ids), self._columns, result.data_ptr()),
            *(self._library.run, torch.get_num_threads()),
        )
        if bad:
            raise IndexError(f"a row beyond the {self._matrices[0].rows} that there are")
        return result
