"""Copies pages within the device pool, so that a request begins with tokens of a page that another request has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sapwood_kernels import reference
from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.pools.device_pool import DevicePool
from sapwood_worker.records.step import IntArray


class PageCopier:
    """Copies pages of all layers; on a GPU with one launch for all layers whose pages are equally large.

    Args:
        pool: The pool.
        ops: The device's operations.
        others: Further tensors with a row for each slot of the first group, which are copied as its pages are.
    """

    def __init__(self, pool: DevicePool, ops: DeviceOps, others: Sequence[Tensor] = ()) -> None:
        self._ops = ops
        self._scratch = [count - 1 for count in pool.counts]
        self._pools: list[list[Tensor]] = [[] for _ in pool.counts]
        for layer, pages in pool.pages.items():
            self._pools[pool.group[layer]].append(pages)
        self._pools[0] += [each.view(pool.num_pages, -1) for each in others]
        # For each group: the words of a page, and the addresses of the pools whose pages have so many.
        self._addresses: list[dict[int, Tensor]] = []
        if pool.device.type == "cuda":
            from sapwood_kernels import triton_page_copy  # only CUDA builds of torch have triton

            self._copy_pages = triton_page_copy.copy_pages
            for pools in self._pools:
                words: dict[int, list[int]] = {}
                for each in pools:
                    words.setdefault(each[0].nbytes // 4, []).append(each.data_ptr())
                self._addresses.append({size: torch.tensor(at, device=pool.device) for size, at in words.items()})

    def copy(self, copies: IntArray) -> None:
        """Copies pages before what is queued next; asynchronous on the current stream.

        Args:
            copies: int64 [C, 3]: as ``Step.page_copies``.
        """
        for group, pools in enumerate(self._pools):
            mine = copies[copies[:, 0] == group]
            if not len(mine):
                continue
            sources, targets = self._ops.to_device(np.ascontiguousarray(mine[:, 1:].T))
            if self._addresses:
                for words, addresses in self._addresses[group].items():
                    self._copy_pages(addresses, words, sources, targets)
            else:
                for pages in pools:
                    reference.copy_pages(pages, sources, targets)

    def warm_up(self) -> None:
        """Compiles the kernel: copies the scratch pages onto themselves."""
        self.copy(np.array([(group, page, page) for group, page in enumerate(self._scratch)]))
