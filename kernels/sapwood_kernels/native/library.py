"""The compiled library: its functions, and the thread pool that they compute on."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

import torch

from sapwood_kernels.native.build import library_name

logger = logging.getLogger(__name__)
_pointer, _number = ctypes.c_void_p, ctypes.c_int64


class NativeLibrary:
    """The functions of the C sources; the last two arguments are ``run`` and a number of threads, but for ``signals.c``.

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
