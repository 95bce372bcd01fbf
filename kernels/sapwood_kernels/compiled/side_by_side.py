"""Triton's kernels, compiled by several processes before they are needed, instead of each when it is first launched.

A warm-up finds the needed kernels: inside :func:`noted`, kernels that are not compiled yet are not launched but noted, as Triton
itself describes them. The processes need no GPU; they write compiled kernels to Triton's cache, where
launches find them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

_TELL_EVERY = 2.0
"""Seconds between two lines that say what is waited for."""


class Kernel(NamedTuple):
    """A variant of a kernel.

    Attributes:
        module, name: The module of its function, and the function's name.
        variant: The types and constants of its arguments, as Triton describes them.
    """

    module: str
    name: str
    variant: str


@contextmanager
def noted() -> Iterator[list[Kernel]]:
    """Notes each kernel that is launched and not compiled yet, once, and does not launch it: it writes nothing."""
    from triton import knobs

    found: set[Kernel] = set()
    kernels: list[Kernel] = []

    def note(*, fn: Any, **about: Any) -> bool:
        kernel = Kernel(fn.module, fn.name, about["compile"]["specialization_data"])
        if kernel not in found:
            found.add(kernel)
            kernels.append(kernel)
        return True  # neither compiled nor launched

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = note
    try:
        yield kernels
    finally:
        knobs.runtime.jit_cache_hook = before


class Compilers:
    """Processes that are started early, because their imports take seconds.

    Args:
        count: How many.
        capability: The compute capability to compile for.
    """

    def __init__(self, count: int, capability: tuple[int, int]) -> None:
        command = [sys.executable, "-P", "-m", __name__, str(10 * capability[0] + capability[1])]
        places = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"}
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=places, text=True)
            for _ in range(count)
        ]

    def compile(self, kernels: Sequence[Kernel], tell: Callable[[str], None]) -> None:
        """Compiles them all, and ends the processes. Kernels that a process cannot compile are left to the launch, which reports
        the error.

        Args:
            kernels: From :func:`noted`.
            tell: Gets a line now and then about what is waited for.
        """
        count = len(self._processes)
        for first, process in enumerate(self._processes):
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(kernels[first::count]))
                process.stdin.close()
            except BrokenPipeError:  # it could not begin
                pass
        began = reported = time.monotonic()
        while any(process.poll() is None for process in self._processes):
            time.sleep(0.02)
            if time.monotonic() - reported > _TELL_EVERY:
                reported = time.monotonic()
                tell(
                    f"compiling {len(kernels)} of Triton's kernels in {count} processes; {reported - began:.0f} s so far"
                )

    def close(self) -> None:
        """Ends the processes if they have nothing to do; returns once they have."""
        for process in self._processes:
            if process.stdin is not None and not process.stdin.closed:
                process.kill()
                process.stdin.close()
            process.wait()


class _Elsewhere:
    """A device's answers to Triton while it compiles, without use of the device."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


def main() -> None:
    """Compiles the kernels that a list in JSON on standard input names, for the compute capability in its argument (90: 9.0)."""
    import triton

    triton.runtime.driver.set_active(_Elsewhere(int(sys.argv[1])))
    for module in ("sapwood_kernels.triton_norm", "sapwood_kernels.attention.triton_decode"):
        import_module(module)  # while the model is still being built
    for module, name, variant in json.loads(sys.stdin.read() or "[]"):
        try:
            getattr(import_module(module), name).preload(variant)
        except Exception as error:
            print(f"{name} could not be compiled ahead: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
