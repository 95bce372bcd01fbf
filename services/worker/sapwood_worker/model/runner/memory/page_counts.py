"""How the KV cache's memory is divided between layers that keep all tokens and layers that keep a window of them."""

from __future__ import annotations

from sapwood_common.errors import ConfigError
from sapwood_worker.records.kv_layout import KVLayout, WindowGroup

_LONG = 16
"""Unless there is memory for the windows of all requests that may run, it does for requests of so many times a window's pages."""


def plan_pages(
    layout: KVLayout,
    num_pages: int | None,
    memory: int,
    max_running: int,
    max_step_tokens: int,
    *,
    alone: bool = True,
) -> tuple[int, ...]:
    """The pages of each group of the layout.

    The windows get pages for all requests that may run and for the prompts of two steps, if that leaves the others at least
    ``_LONG`` times as many; never more than the others. Where no layer keeps anything in the first group's pages, the windows
    have all the memory, and the others are ``_LONG`` times as many.

    Args:
        layout: The layout.
        num_pages: Pages of the first group; None: as many as the memory holds.
        memory: Bytes for all of them, unless ``num_pages`` is given.
        max_running: Most requests that run at once.
        max_step_tokens: Most tokens of a step.
        alone: Whether no other model keeps something for each page of the first group.

    Raises:
        ConfigError: A window's pages would not do for a single request.
    """
    groups = range(1, len(layout.groups))
    bytes_of = [layout.group_bytes(group) for group in (0, *groups)]
    computed = 2 * -(-max_step_tokens // layout.page_size)
    wanted = [max_running * WindowGroup(layout.reach(group), 0).least(layout.page_size) + computed for group in groups]
    if num_pages is None and not bytes_of[0]:  # all layers have windows, perhaps those of a pipeline's stage only
        even = memory // layout.page_bytes
        num_pages, windows = even * (_LONG if alone else 1), [even] * len(wanted)
    elif num_pages is None:
        even = memory // layout.page_bytes
        # As many as a first group _LONG times as large leaves room for.
        most = memory // (sum(bytes_of[1:]) + _LONG * bytes_of[0]) if wanted else 0
        windows = [
            min(even, each, max(most, _least(layout, group))) for group, each in zip(groups, wanted, strict=True)
        ]
        left = memory - sum(count * size for count, size in zip(windows, bytes_of[1:], strict=True))
        num_pages = left // bytes_of[0]
    else:
        windows = [min(num_pages, each) for each in wanted]
    for group, count in zip(groups, windows, strict=True):
        if count < min(_least(layout, group), num_pages):
            raise ConfigError(
                f"the KV cache holds {count} pages of {layout.page_size} tokens for layers that see {layout.groups[group]} "
                f"tokens, fewer than the {_least(layout, group)} that a request needs: give it more memory"
            )
    return (num_pages, *windows)


def _least(layout: KVLayout, group: int) -> int:
    return WindowGroup(layout.reach(group), 0).least(layout.page_size)
