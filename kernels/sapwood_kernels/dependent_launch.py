"""Kernels of a step that begin before the one ahead has ended: programmatic dependent launch, from Hopper on.

Such a kernel asks first thing that the next may begin (``gdc_launch_dependents``) and waits for the one ahead (``gdc_wait``)
before it reads or writes what others write. So the next is in place, with its weights under way, when the last program of this
one ends. For steps of few tokens, whose kernels take microseconds; in a mixture of experts for up to some hundred: all between
norm and residual takes an H100 4 to 7 us less of 400 to 440 so, with 64 tokens and with 256.

Lengths and page tables may be read before the wait: copies and torch's kernels write them, and a step's first kernel, of its
embedding, is not of this kind, so that it begins once they have ended. Of each kernel a program at least waits, so that none has
ended before the one ahead.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

MOST_ROWS = 16
"""Rows up to which it is used where nothing else is said."""
MIXTURE_ROWS = 256
"""Rows up to which norms and the kernels of a mixture of experts use it. Above 16, attention's kernels do not: decodes of 256
requests of two models took an H200 2 % longer when they did, in the only run, and no other cause is known."""


def options(x: Tensor, most: int = MOST_ROWS) -> dict[str, Any]:
    """A launch's arguments for a step whose rows are ``x``'s: the kernel's constant ``PDL``, and Triton's own option with it.

    Args:
        x: [T, K].
        most: Largest T with which it is used.
    """
    if x.is_cuda and len(x) <= most and _is_able(x.device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@cache
def _is_able(device: torch.device) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (9, 0)
