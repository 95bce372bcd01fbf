"""Prefixes that are pinned: locked in the tree, with what lies beside them in the windows, until they are taken back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sapwood_common.errors import ResourceExhaustedError
from sapwood_worker.core.cache.page_allocator import PageIds
from sapwood_worker.core.cache.radix_node import Match, Node
from sapwood_worker.core.cache.radix_tree import RadixTree
from sapwood_worker.core.cache.window_pages import WindowPages


@dataclass(frozen=True, slots=True)
class _Pin:
    """The locked end of a pinned prefix, until when it is pinned, and what it holds of each window."""

    node: Node
    until: float | None
    held: tuple[PageIds, ...]


class Pins:
    """The pinned prefixes of one tree.

    Args:
        tree: Has their pages.
        windows: The pages of layers that see a window only.
        scarce: Those of them that have fewer pages than the page table.
    """

    def __init__(self, tree: RadixTree, windows: Sequence[WindowPages], scarce: Sequence[WindowPages]) -> None:
        self._tree = tree
        self._windows = windows
        self._scarce = scarce
        self._pins: dict[str, _Pin] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def add(self, name: str, match: Match, most: int, until: float | None) -> None:
        """Pins a prefix; a pin of the same name is replaced.

        Args:
            name: The pin's.
            match: The prefix.
            most: Pages that may be pinned in all.
            until: When :meth:`expire` takes it back; None: never.

        Raises:
            ResourceExhaustedError: More than ``most`` pages would be pinned; nothing changed.
        """
        old = self._pins.get(name)
        kept = [pin.node for pin in self._pins.values() if pin is not old]
        needed = sum(len(node.pages) for node in _and_above([*kept, match.node]))
        if needed > most:
            raise ResourceExhaustedError(f"{needed} pages would be pinned; at most {most} can be", field="token_ids")
        for window in self._scarce:
            if (len(kept) + 1) * window.tail + window.least > window.num_pages:
                raise ResourceExhaustedError(
                    f"the pages of a window would not do for {len(kept) + 1} pins and a request", field="token_ids"
                )
        self._tree.lock(match.node)
        self._pins[name] = _Pin(match.node, until, tuple(each.hold(match.pages) for each in self._windows))
        if old is not None:
            self._release(old)

    def remove(self, name: str) -> bool:
        """Takes a pin back; returns whether there was one of this name."""
        pin = self._pins.pop(name, None)
        if pin is not None:
            self._release(pin)
        return pin is not None

    def expire(self, now: float) -> None:
        """Takes back the pins whose time is over. O(pins)."""
        for name in [name for name, pin in self._pins.items() if pin.until is not None and pin.until <= now]:
            self.remove(name)

    def ends(self) -> list[Node]:
        """The locked node of each pin."""
        return [pin.node for pin in self._pins.values()]

    def nodes(self) -> set[Node]:
        """All nodes that hold something pinned."""
        return _and_above(self.ends())

    def held(self, nth: int) -> list[PageIds]:
        """What each pin holds of the ``nth`` window."""
        return [pin.held[nth] for pin in self._pins.values()]

    def _release(self, pin: _Pin) -> None:
        self._tree.unlock(pin.node)
        for window, pages in zip(self._windows, pin.held, strict=True):
            window.let_go(pages)


def _and_above(ends: list[Node]) -> set[Node]:
    """These nodes and all above them."""
    found: set[Node] = set()
    for node in ends:
        at: Node | None = node
        while at is not None and at not in found:
            found.add(at)
            at = at.parent
    return found
