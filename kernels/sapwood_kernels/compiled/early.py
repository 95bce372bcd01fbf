"""FlashInfer's libraries, compiled side by side while something else is done, instead of each when it is first used."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch

from sapwood_kernels.attention.planned import Variant

_TELL_EVERY = 5.0
"""Seconds between two lines that say what is waited for."""
_NICE = 19
"""Niceness of the compilers: they take all cores for a minute in which Triton compiles what the start waits for, and requests
are served."""


class EarlyBuild:
    """Work that has been begun on a thread.

    Args:
        names: The libraries being compiled, for people.
        work: Makes it.
    """

    def __init__(self, names: Sequence[str], work: Callable[[], None]) -> None:
        self._names = names
        self._work = work
        self._error: Exception | None = None
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="kernels", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the work has ended, well or not."""
        return not self._thread.is_alive()

    @property
    def error(self) -> Exception | None:
        """Why the work has failed; None: it has not."""
        return self._error

    @property
    def seconds(self) -> float:
        """Seconds since the work was begun."""
        return time.monotonic() - self._began

    def wait(self, tell: Callable[[str], None], every: float = _TELL_EVERY) -> None:
        """Returns once all is made.

        Args:
            tell: Gets a line now and then about what is waited for.
            every: Seconds between.

        Raises:
            RuntimeError: The compiler has failed; the error has its output.
        """
        while self._thread.is_alive():
            self._thread.join(every)
            if self._thread.is_alive():
                tell(f"waiting for FlashInfer's compiler: {', '.join(self._names)}; {self.seconds:.0f} s so far")
        if self._error is not None:
            raise RuntimeError(f"FlashInfer's kernels could not be compiled: {self._error}") from self._error

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)  # this thread's compilers, too
        try:
            self._work()
        except Exception as error:
            self._error = error


def begin_flashinfer(
    kinds: Sequence[Variant], head_dim: int, dtype: torch.dtype, *, prefill: bool, decode: bool
) -> EarlyBuild | None:
    """Begins to compile what attention will ask FlashInfer for; None: all is there.

    Args:
        kinds: The kinds of layers.
        head_dim: Elements of a head.
        dtype: The dtype of queries, keys and values.
        prefill: Whether FlashInfer computes prompts.
        decode: Whether it computes decodes over a cache of ``dtype``.
    """
    from flashinfer.jit.attention.modules import gen_batch_prefill_module
    from flashinfer.utils import determine_attention_backend

    device = torch.device("cuda")
    backends = []
    if prefill:
        backends.append(determine_attention_backend(device, 0, False, False, dtype, dtype))
    if decode:  # on tensor cores, by the kernel for prompts
        backends.append("fa2")
    specs = {}
    for backend in dict.fromkeys(backends):
        for window, capped in dict.fromkeys((kind.window is not None, kind.softcap is not None) for kind in kinds):
            spec = gen_batch_prefill_module(
                backend, dtype, dtype, dtype, torch.int32, head_dim, head_dim, 0, window, capped, False
            )
            name = f"{backend} for heads of {head_dim}" + " with windows" * window + " with a soft cap" * capped
            if not _is_built(spec):
                specs[name] = spec
    return EarlyBuild(list(specs), lambda: build_each(list(specs.values()))) if specs else None


class Library(Protocol):
    """The part of FlashInfer's ``JitSpec`` that is used."""

    @property
    def is_aot(self) -> bool:
        """Whether the library was compiled elsewhere."""
        ...

    @property
    def is_compiled(self) -> bool:
        """Whether the library's file is there."""
        ...

    @property
    def build_dir(self) -> Path:
        """The folder where the library is compiled."""
        ...

    def build(self, verbose: bool) -> None:
        """Compiles the sources that have changed, as the library's first use does."""
        ...


def build_each(specs: Sequence[Library]) -> None:
    """Compiles libraries side by side, each where its first use looks.

    FlashInfer's ``build_jit_specs`` runs one ninja for all, in the folder above, where its log then lies. At its first use a
    library runs a ninja of its own, which finds no log and compiles the library again: a minute in which nothing else is done.
    """
    errors: list[Exception] = []

    def build(spec: Library) -> None:
        try:
            spec.build(False)
        except Exception as error:
            errors.append(error)

    # A process that is to end does not wait for them, as it would for those of an executor.
    threads = [threading.Thread(target=build, args=(spec,), daemon=True) for spec in specs]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    if errors:
        raise errors[0]


def _is_built(spec: Library) -> bool:
    """Whether the library's first use would compile nothing."""
    return spec.is_aot or (spec.is_compiled and (spec.build_dir / ".ninja_log").exists())
