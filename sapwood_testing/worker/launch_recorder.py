"""Records what a step launches: each operation of torch that computes or copies, and each function of the C library.

One line for an operation: its name, the shapes that it reads, the shapes that it makes, and how often it is launched. Views
are left out, as they launch nothing. A digest stands for the order of all launches.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sapwood_kernels.native.products import NativeLibrary


def _shapes(values: Any) -> Iterator[str]:
    if isinstance(values, Tensor):
        yield f"{str(values.dtype).removeprefix('torch.')}{list(values.shape)}"
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _shapes(value)


def _is_view(function: Any) -> bool:
    returned = function._schema.returns
    return bool(returned) and all(each.alias_info is not None and not each.alias_info.is_write for each in returned)


class LaunchRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records while it is entered with ``with``. Make the model below :func:`recorded_library`, else C functions are missing."""

    def __init__(self, native: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._lines = native

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not _is_view(function):
            name = str(function).removesuffix(".default")
            self._lines.append(f"{name}({', '.join(_shapes(args))}) -> {', '.join(_shapes(result)) or 'nothing'}")
        return result

    def take(self) -> list[str]:
        """What was launched since the last call: the digest of the order, then a line for each kind of launch."""
        order = hashlib.sha256("\n".join(self._lines).encode()).hexdigest()[:12]
        lines = [f"{count} x {line}" for line, count in Counter(self._lines).items()]
        launches = len(self._lines)
        self._lines.clear()
        return [f"{launches} launches, order {order}", *lines]


@contextmanager
def recorded_library() -> Iterator[list[str]]:
    """Has the C library, where it is loaded inside the ``with``, append the name of each function that is called to the list."""
    called: list[str] = []
    make = NativeLibrary._plain

    def recording(library: NativeLibrary, name: str, *arguments: type) -> Any:
        function = make(library, name, *arguments)

        def note(result: Any, function: Any, arguments: Any) -> Any:
            called.append(f"sapwood_{name}")
            return result

        function.errcheck = note  # which leaves the function at its address, as recordings of calls need it
        return function

    with patch.object(NativeLibrary, "_plain", recording):
        yield called
