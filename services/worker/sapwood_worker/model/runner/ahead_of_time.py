"""Compiles the Triton kernels of a model's steps in parallel, at its first start on a machine."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import torch

import sapwood_kernels
from sapwood_common.cores import usable_cores
from sapwood_kernels.compiled import places
from sapwood_kernels.compiled.side_by_side import Compilers, noted
from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.checkpoint.hf_config import read_hf_config
from sapwood_worker.model.compiled_kernels import this_machine
from sapwood_worker.model.distributed.group import Group
from sapwood_worker.model.runner.options import RunnerOptions

logger = logging.getLogger(__name__)

_MOST_COMPILERS = 8
"""Processes; each imports torch first, and there are some thirty kernels."""
_NO_MATTER = ("parallel", "model_path", "load_format", "seed", "threads", "kernels_wait")
"""Options that change no Triton kernel; ``config.json`` itself is compared. Archives are built with dummy weights."""
_SOURCES = Path(sapwood_kernels.__file__).parent


class AheadOfTimeKernels:
    """Compiles a model's Triton kernels in parallel before any graph is captured, at the model's first start on a machine.

    Args:
        mark: A file that exists after a start like this one has compiled everything.
        compilers: Processes that compile.
    """

    def __init__(self, mark: Path, compilers: Compilers) -> None:
        self._mark = mark
        self._compilers = compilers

    @classmethod
    def begin(cls, options: RunnerOptions, ops: DeviceOps, cores: int | None = None) -> AheadOfTimeKernels | None:
        """Starts the processes; None: nothing needs to be compiled here, or not in this way.

        Args:
            options: The model's. The first rank of a host compiles for all ranks that share layers; pipeline stages and models
                with experts compile at first use.
            ops: The operations of the device.
            cores: The number of processors; None: they are counted, within a container's limit.
        """
        count = min(_MOST_COMPILERS, (usable_cores() if cores is None else cores) // 2)
        config = options.model_path / "config.json"
        ranks = options.parallel.tp
        first = ranks.rank % max(1, ranks.size // options.nodes) == 0 and options.parallel.pp.size == 1
        if ops.device.type != "cuda" or not first or count < 2 or not config.is_file():
            return None
        if read_hf_config(options.model_path)[1].sparse is not None:  # some of their kernels read where others say
            return None
        facts = this_machine()
        given = [getattr(options, each.name) for each in fields(options) if each.name not in _NO_MATTER]
        known = hashlib.sha256(repr((sorted(facts.items()), given, ranks.size)).encode() + config.read_bytes())
        for source in sorted(_SOURCES.rglob("*.py")):  # a kernel that has changed is to be compiled again
            known.update(source.read_bytes())
        mark = places.triton_cache() / f"sapwood-{known.hexdigest()[:32]}"
        return None if mark.exists() else cls(mark, Compilers(count, torch.cuda.get_device_capability(ops.device)))

    def compile(self, rehearse: Callable[[], None], ranks: Group = Group()) -> None:  # noqa: B008 - it holds nothing
        """Compiles the kernels that a warm-up would launch. Failures are logged; those kernels are compiled when they are
        launched.

        Args:
            rehearse: Computes all kinds of steps, and launches only the Triton kernels that are compiled.
            ranks: The ranks that it computes with; they do not take part in this.
        """
        began = time.monotonic()
        try:
            with ranks.rehearsing(), noted() as kernels:
                rehearse()
            known = time.monotonic()
            if kernels:  # else the processes are ended where they are
                self._compilers.compile(kernels, logger.info)
            logger.info(
                "kernels: %d of Triton's compiled side by side in %.1f s, found in %.1f",
                len(kernels), time.monotonic() - known, known - began,
            )  # fmt: skip
        except Exception as error:
            logger.warning("kernels are compiled one after another: %s", error)
        finally:
            self._compilers.close()
        torch.cuda.empty_cache()

    def remember(self) -> None:
        """Notes that this start has compiled everything, so that a start like it need not check. If the note cannot be written,
        the next start checks."""
        with suppress(OSError):
            self._mark.parent.mkdir(parents=True, exist_ok=True)
            self._mark.touch()
