"""The layout of the KV cache: what each layer keeps of a token, in which shape and for how long.

Pools on device and host, copies, stores, page counts and memory plans depend only on this layout. Some layouts:

| | parts | heads | dim | sharding | needed |
|---|---|---|---|---|---|
| grouped attention | 2: keys, values | key heads | head's size | heads | all |
| its layers with a window | 2 | key heads | head's size | heads | the window |
| latent attention (MLA) | 1: read as key and as value | 1 | rank + rotary part | replicated | all |
| recurrent layers | 1 | heads | a head's state | heads | state |

States are no pages: a request has one slot of its own, and snapshots have others (:class:`StateSlots`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import msgspec

Sharding = Literal["heads", "replicated"]
Order = Literal["HND", "NHD"]
Needed = int | Literal["all", "state"]

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True, slots=True)
class KVComponent:
    """What some layers keep of each token.

    Attributes:
        layers: The layers, ascending.
        parts: Vectors that each head keeps of a token: keys and values are 2, the last part is what attention sums up.
        heads: Heads of a layer.
        dim: Numbers in a vector.
        dtype: The numbers' dtype, by torch's name.
        sharding: Whether each rank of a tensor-parallel group keeps a range of the heads, or all heads.
        needed: How long a token is kept. ``all``: as long as the request. A number: the size of a sliding window. ``state``: not
            at all; a request keeps one vector for each head, which each token changes.
    """

    layers: tuple[int, ...]
    parts: int
    heads: int
    dim: int
    dtype: str
    sharding: Sharding = "heads"
    needed: Needed = "all"


class WindowGroup(msgspec.Struct, frozen=True, array_like=True):
    """The pages of components that are needed only for a while, such as a sliding window.

    Attributes:
        reach: How many tokens before it a query sees.
        num_pages: Their pages.
    """

    reach: int
    num_pages: int

    def tail(self, page_size: int) -> int:
        """Pages before a page's first token that its query sees."""
        return -(-self.reach // page_size)

    def least(self, page_size: int) -> int:
        """The least pages with which one request can run: its window, the page being written, and two pages that are freed
        late."""
        return self.tail(page_size) + 4


class StateSlots(msgspec.Struct, frozen=True, array_like=True):
    """The slots for states of layers that keep one instead of keys and values.

    Each row of the page table has a slot for its request's state; these are further ones.

    Attributes:
        snapshots: Slots for copies of states, from which requests with the same beginning continue.
        num_bytes: Bytes of a state, of all layers.
    """

    snapshots: int
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The layout of a model's pages.

    Attributes:
        components: What is kept; a layer keeps at most one thing in pages, and at most one state.
        page_size: Tokens in a page.
        order: The order of a page's dimensions: HND puts a head's tokens side by side, so that a range of heads is contiguous;
            NHD puts a token's heads side by side.

    Raises:
        ValueError: The components contradict each other or themselves.
    """

    components: tuple[KVComponent, ...]
    page_size: int
    order: Order = "HND"

    def __post_init__(self) -> None:
        for some in (self.paged, self.states):
            layers = [layer for each in some for layer in each.layers]
            if len(set(layers)) != len(layers):
                raise ValueError(f"a KV layout needs layers, none of them in two components: {layers}")
        if not any(each.layers for each in self.components):
            raise ValueError("a KV layout needs layers")
        if not self.paged:
            raise ValueError("a KV layout needs a component with pages, if only one that no layer keeps anything in")
        for each in self.components:
            if each.dtype not in _ITEM_BYTES:
                raise ValueError(f"KV layout: dtype {each.dtype!r} is none of {', '.join(_ITEM_BYTES)}")
            numbers = (each.parts, each.heads, each.dim, each.needed if isinstance(each.needed, int) else 1)
            if min(numbers) < 1:
                raise ValueError(f"KV layout: parts, heads, dim and window must be at least 1: {each}")

    @property
    def states(self) -> tuple[KVComponent, ...]:
        """The components that are states."""
        return tuple(each for each in self.components if each.needed == "state")

    @property
    def paged(self) -> tuple[KVComponent, ...]:
        """The components that are kept in pages."""
        return tuple(each for each in self.components if each.needed != "state")

    @property
    def state_bytes(self) -> int:
        """Bytes of a request's state, of all layers."""
        return sum(self.layer_bytes(each) * len(each.layers) for each in self.states)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that keep something in pages, ascending."""
        return tuple(sorted(layer for each in self.paged for layer in each.layers))

    def of(self, layer: int) -> KVComponent:
        """What a layer keeps in pages."""
        return next(each for each in self.paged if layer in each.layers)

    def page_shape(self, component: KVComponent) -> tuple[int, int, int, int]:
        """A page of one layer: [parts, heads, slots, dim], or [parts, slots, heads, dim] in the order NHD."""
        slots = 1 if component.needed == "state" else self.page_size
        inner = (component.heads, slots) if self.order == "HND" else (slots, component.heads)
        return (component.parts, *inner, component.dim)

    def layer_bytes(self, component: KVComponent) -> int:
        """Bytes of a page of one layer."""
        parts, first, second, dim = self.page_shape(component)
        return parts * first * second * dim * _ITEM_BYTES[component.dtype]

    @property
    def groups(self) -> tuple[Needed, ...]:
        """How long the pages of each page table are needed. Components that are needed equally long share a table.

        The first is that of the components needed longest, and keeps its pages for all of a request.
        """
        found = {each.needed for each in self.paged}
        return tuple(sorted(found, key=lambda needed: (needed != "all", -_tokens(needed))))

    def group_of(self, component: KVComponent) -> int:
        """The index of a component's group."""
        return self.groups.index(component.needed)

    def reach(self, group: int) -> int:
        """How many tokens before it a query sees in a group other than the first."""
        return _tokens(self.groups[group]) - 1

    def group_bytes(self, group: int) -> int:
        """Bytes of a page of all layers of a group."""
        needed = self.groups[group]
        return sum(self.layer_bytes(each) * len(each.layers) for each in self.components if each.needed == needed)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of all layers."""
        return sum(map(self.group_bytes, range(len(self.groups))))

    @property
    def replicated(self) -> bool:
        """Whether all ranks keep the same."""
        return all(each.sharding == "replicated" for each in self.components)

    def offsets(self) -> dict[int, int]:
        """Where each layer's bytes begin in the record of a page, which holds component after component."""
        found: dict[int, int] = {}
        at = 0
        for each in self.paged:
            for layer in each.layers:
                found[layer] = at
                at += self.layer_bytes(each)
        return found

    def kept_whole(self) -> KVLayout:
        """The same layout, but every token is kept as long as its request, so that all pages are in one table."""
        kept = (each if each.needed == "state" else replace(each, needed="all") for each in self.components)
        return replace(self, components=tuple(kept))

    def shard(self, ranks: int) -> KVLayout:
        """The layout of one rank out of this many equal ranks; with fewer heads than ranks, neighbouring ranks keep the same
        head.

        Raises:
            ValueError: Neither number divides the other.
        """
        return replace(self, components=tuple(_shard(each, ranks) for each in self.components))

    def stage(self, layers: range) -> KVLayout:
        """The layout of a pipeline's stage that has these layers. It has all groups, also those without layers here."""
        components = (
            replace(each, layers=tuple(layer for layer in each.layers if layer in layers)) for each in self.components
        )
        return replace(self, components=tuple(components))

    @property
    def identity(self) -> str:
        """A text that is equal for layouts whose pages can be exchanged as they are, page sizes apart."""
        parts = [
            f"{len(each.layers)}x{each.parts}x{each.heads}x{each.dim}-{each.dtype}-{each.needed}-{_runs(each.layers)}"
            for each in self.components
        ]
        return f"{self.order}:{','.join(parts)}"


def _tokens(needed: Needed) -> int:
    return needed if isinstance(needed, int) else 0


def _shard(component: KVComponent, ranks: int) -> KVComponent:
    if component.sharding == "replicated" or ranks % component.heads == 0:
        return component if component.sharding == "replicated" else replace(component, heads=1)
    if component.heads % ranks:
        raise ValueError(f"{component.heads} heads cannot be spread evenly over {ranks} ranks")
    return replace(component, heads=component.heads // ranks)


def _runs(layers: tuple[int, ...]) -> str:
    """Layers as text: 0, 1, 2, 7 are ``0-2.7``; none are the empty text."""
    starts = [i for i, layer in enumerate(layers) if not i or layers[i - 1] != layer - 1]
    ends = [*(start - 1 for start in starts[1:]), *((len(layers) - 1,) if layers else ())]
    return ".".join(
        str(layers[start]) if start == end else f"{layers[start]}-{layers[end]}"
        for start, end in zip(starts, ends, strict=True)
    )
