"""The library of C kernels: finds it, loads it, and calls its products."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import gguf
import torch
from torch import Tensor

from sapwood_kernels.native.build import library_name

logger = logging.getLogger(__name__)


# The compiled library: its functions, and the thread pool that they compute on.


_pointer, _number = ctypes.c_void_p, ctypes.c_int64


class NativeLibrary:
    """The functions of the C sources; the last two arguments are ``run`` and a number of threads, except in ``signals.c``.

    Args:
        path: The library.

    Attributes:
        run: torch's pool: two pools on the same cores would wait for each other. None: functions take one thread.

    Raises:
        OSError: It is not there, or is not for this machine.
    """

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        try:
            run = ctypes.cast(ctypes.CDLL(None).GOMP_parallel, _pointer).value
        except AttributeError:
            logger.warning("torch's thread pool is not GNU OpenMP's: what is computed in C takes one thread")
            run = None
        self.run = run
        self.multiply = self._function(
            "gguf_multiply",
            *(_pointer, _number, _pointer, _number, _number, _number, _pointer, _number),
            *(_pointer, ctypes.c_float, _number),
        )
        self.rows = self._function("gguf_rows", _pointer, _pointer, _number, _number, _pointer)
        self.norm = self._function("norm", _pointer, _number, _number, _number, _pointer, ctypes.c_float, _pointer)
        self.store_heads = self._function("store_heads", *[_pointer] * 5, _number, _pointer)
        self.attend = self._function("attend", *[_pointer] * 3, _number, _pointer, _number, _pointer)
        self.replay = self._function("replay", _pointer, _number)
        self.post = self._plain("post", _pointer, _number)
        self.wait = self._plain("wait", _pointer, _number, _number, _number)

    def _function(self, name: str, *arguments: type) -> ctypes._NamedFuncPointer:
        return self._plain(name, *arguments, _pointer, ctypes.c_uint)

    def _plain(self, name: str, *arguments: type) -> ctypes._NamedFuncPointer:
        function: ctypes._NamedFuncPointer = getattr(self._library, f"sapwood_{name}")
        function.restype = _number
        function.argtypes = arguments
        return function


def processor() -> str:
    """The kind of processor that this is, by torch's words; AVX-512 counts with VNNI only, which came two years after it."""
    capability = torch.backends.cpu.get_cpu_capability()
    return "AVX2" if capability == "AVX512" and not torch.cpu._is_vnni_supported() else capability


def load_library() -> NativeLibrary | None:
    """The library for this processor; None, with a line in the log that says why, where it was not compiled."""
    path = Path(__file__).parent / library_name(processor())
    try:
        return NativeLibrary(path)
    except OSError as error:
        logger.warning(
            "GGUF weights are widened as they are loaded, no kernel for them: %s; hatch_build.py makes it", error
        )
        return None


SMALL = 24
"""Tokens up to which a product has a norm before it and a gate after it, as in ``products.c``."""
_GATES = {None: 0, "silu": 1, "gelu_tanh": 2}

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
"""Types of GGUF files that the library multiplies, also in whole numbers: type -> ggml's number of it, numbers of a block, and
bytes of a block."""
TABLES = {
    kind.name: (kind.value, *gguf.GGML_QUANT_SIZES[kind])
    for kind in (
        gguf.GGMLQuantizationType.IQ4_NL,
        gguf.GGMLQuantizationType.IQ4_XS,
        gguf.GGMLQuantizationType.MXFP4,
    )
}
"""The same for types of 4-bit codes that stand for the numbers of a table. The library multiplies them as float32 only."""
GROUPS = {"G4_32": (64, 32, 24), "G4_128": (65, 128, 72)}
"""The same for types of our own: 4-bit codes with a float32 scale and a zero."""
ALL = TYPES | TABLES | GROUPS


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("type", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("whole", ctypes.c_int64),
    )


class GgufProduct:
    """``x @ weight.T`` for matrices of the same width as a GGUF file stores them, whose outputs lie side by side.

    Args:
        library: The compiled library.
        parts: For each matrix its type and its rows' bytes, uint8 [rows, bytes]; kept, not copied. Rows may lie apart.
        columns: Numbers in a row.
        digits: x may be rounded to this many digits of a byte of the largest of each 32 numbers, where the processor multiplies
            such faster: 2; 3, which is as near as float32; 0: it may not.
    """

    def __init__(
        self, library: NativeLibrary, parts: Sequence[tuple[str, Tensor]], columns: int, *, digits: int = 0
    ) -> None:
        self._library = library
        self._parts = tuple(parts)
        self._columns = columns
        self._matrices = (_Matrix * len(parts))()
        self._outputs = 0
        tables = any(kind in TABLES for kind, _ in parts)
        for matrix, (kind, rows) in zip(self._matrices, parts, strict=True):
            number, per_block, block_bytes = ALL[kind]
            if rows.dtype != torch.uint8 or rows.stride(1) != 1 or rows.shape[1] != columns // per_block * block_bytes:
                raise ValueError(f"rows of {columns} numbers in {kind} are not of shape {list(rows.shape)}")
            matrix.data, matrix.stride, matrix.rows = rows.data_ptr(), rows.stride(0), rows.shape[0]
            matrix.width, matrix.type, matrix.first = rows.shape[1], number, self._outputs
            matrix.whole = 0 if tables else digits
            self._outputs += rows.shape[0]

    def __call__(
        self,
        x: Tensor,
        *,
        norm: tuple[Tensor, float] | None = None,
        gate: Literal["silu", "gelu_tanh"] | None = None,
    ) -> Tensor:
        """``gate(norm(x) @ weight.T)``.

        Args:
            x: float32 [T, K]; at most :data:`SMALL` rows with a norm or a gate.
            norm: Weight (float32 [K], contiguous) and eps of an RMSNorm.
            gate: A gated activation of the outputs; their first half is the gate.

        Returns:
            float32 [T, N], or [T, N / 2] with a gate.

        Raises:
            MemoryError: There is no memory for copies of x.
        """
        tokens, outputs = x.shape[0], self._outputs if gate is None else self._outputs // 2
        assert tokens <= SMALL or (norm is None and gate is None)
        result = torch.empty(tokens, outputs)
        if x.stride(1) != 1:
            x = x.contiguous()
        weight, eps = (None, 0.0) if norm is None else (norm[0].data_ptr(), norm[1])
        failed = self._library.multiply(
            *(self._matrices, len(self._parts), x.data_ptr(), tokens, self._columns, x.stride(0)),
            *(result.data_ptr(), outputs, weight, eps, _GATES[gate], self._library.run, torch.get_num_threads()),
        )
        if failed:
            raise MemoryError(f"no memory for {tokens} rows of {self._columns} numbers")
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


# Signals between processes that share memory: ``signals.c``.


SIGNAL_BYTES = 64
"""Bytes of a process's signal: a cache line."""


class Signals:
    """A count for each of several processes, in memory that they share, which is zero at first.

    A process that has waited for a count sees all that was written before it.

    Args:
        library: The compiled library.
        address: Of ``size * SIGNAL_BYTES`` bytes, aligned to as many as one signal has; they have to outlive this object.
        rank: This process, from 0.
        size: How many processes there are.
    """

    def __init__(self, library: NativeLibrary, address: int, rank: int, size: int) -> None:
        self._post, self._wait = library.post, library.wait
        self._address, self._size = address, size
        self._own = address + rank * SIGNAL_BYTES
        self._count = 0

    def count_up(self) -> None:
        """Says that this process has come one further."""
        self._count += 1
        self._post(self._own, self._count)

    def wait(self, seconds: float) -> int | None:
        """Waits until all have come as far as this process; lets other threads run.

        Returns:
            None, or after ``seconds`` a process that has not.
        """
        late: int = self._wait(self._address, self._size, self._count, int(seconds * 1e9))
        return None if late < 0 else late
