"""How much a worker runs at once, chosen from the device and the model where no flag says it.

The largest values are those of the figures in docs/design/figures-gpu.md, measured on GPUs with ample memory. A smaller GPU gets
what its memory holds, by a careful estimate. On a CPU they are those of its figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_GIB = 1 << 30

GPU_RUNNING, GPU_STEP_TOKENS = 256, 8192
CPU_RUNNING, CPU_STEP_TOKENS = 64, 512
_LEAST_RUNNING, _LEAST_STEP_TOKENS = 8, 512

REQUEST_TOKENS = 1024
"""Tokens of prompt and output that the cache is to hold of each running request, unless the context is shorter."""
_STEP_SHARE = 8
"""A step's activations get one part in this many of the memory that the weights leave."""
_STATES_EACH, _STATE_SHARE = 2, 4
"""Room for this many states for each request: its own and snapshots. On a CPU the requests' own take at most one part in this
many of the cache."""
_SPARE = 2
"""Activations take this many times the memory of one layer's tensors, because kernels have buffers."""

_CPU_CACHE, _CPU_CACHE_SHARE = _GIB, 8
"""A CPU's KV cache has 1 GiB, but at most one part in this many of the memory of the machine or its container."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What the model runs on.

    Attributes:
        kind: ``cuda`` or ``cpu``.
        total: Bytes of its memory; of a CPU, what the container may have of it.
        used: Bytes of a GPU that are taken once the weights are loaded, by these and by others.
    """

    kind: Literal["cuda", "cpu"]
    total: int
    used: int = 0


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What of the model takes memory, on one rank.

    Attributes:
        token_bytes: Bytes of the KV cache that a token takes.
        state_bytes: Bytes of a request's state, of layers that keep one; 0: none does.
        hidden_size: Width of the residual stream.
        intermediate_size: The rank's width inside the MLP.
        context_length: Most tokens of a request.
    """

    token_bytes: float
    hidden_size: int
    intermediate_size: int
    context_length: int
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Given:
    """What flags say; None: nothing.

    Attributes:
        max_running: Most requests that run at once.
        max_step_tokens: Most tokens of a step.
        cache_tokens: What the KV cache is to hold, as ``num_pages`` says.
        cache_bytes: Its memory, as ``kv_cache_gb`` says.
        memory_fraction: Largest share of a GPU's memory that may be in use.
    """

    max_running: int | None = None
    max_step_tokens: int | None = None
    cache_tokens: int | None = None
    cache_bytes: int | None = None
    memory_fraction: float = 0.9


@dataclass(frozen=True, slots=True)
class Sizes:
    """What was chosen.

    Attributes:
        max_running: Most requests that run at once.
        max_step_tokens: Most tokens of a step.
        cache_bytes: Memory of the KV cache; None: flags give its pages, or a trial of the largest step shows how much memory
            remains.
        reasons: Why, for each of them.
    """

    max_running: int
    max_step_tokens: int
    cache_bytes: int | None
    reasons: tuple[str, ...]

    @property
    def least(self) -> tuple[int, int, int]:
        """What orders the choices of several ranks."""
        return self.max_step_tokens, self.max_running, self.cache_bytes or 0


def choose_sizes(device: DeviceFacts, model: ModelFacts, given: Given) -> Sizes:
    """The sizes of a worker; what a flag gives is taken as it is."""
    sized = given.cache_tokens is not None or given.cache_bytes is not None
    if device.kind == "cpu":
        cache, cache_reason = given.cache_bytes, "given"
        if not sized:
            cache = min(_CPU_CACHE, device.total // _CPU_CACHE_SHARE)
            why = "the usual on a CPU" if cache == _CPU_CACHE else f"an eighth of the {_gib(device.total)} there are"
            cache_reason = f"{_gib(cache)}, {why}"
        running, running_reason = CPU_RUNNING, "as measured on CPUs"
        if not sized and cache is not None and running * model.state_bytes * _STATE_SHARE > cache:
            running = max(1, cache // (_STATE_SHARE * model.state_bytes))
            running_reason = f"states of {_gib(model.state_bytes)} take one part in {_STATE_SHARE} of the KV cache"
        step, step_reason = CPU_STEP_TOKENS, "as measured on CPUs"
    else:
        cache, cache_reason = given.cache_bytes, "given"
        free = int(device.total * given.memory_fraction) - device.used
        if not sized:
            cache_reason = f"what the largest step leaves of {given.memory_fraction:.0%} of {_gib(device.total)}"
        room = free - _cache_bytes(model, given)
        step, step_reason = _step_tokens(model, room)
        left = free - (given.max_step_tokens or step) * _activation_bytes(model)
        running, running_reason = _running(model, _cache_bytes(model, given) if sized else max(0, left))
    return Sizes(
        given.max_running or running,
        given.max_step_tokens or step,
        cache,
        (
            f"max_running {given.max_running} given"
            if given.max_running
            else f"max_running {running}: {running_reason}",
            f"max_step_tokens {given.max_step_tokens} given"
            if given.max_step_tokens
            else f"max_step_tokens {step}: {step_reason}",
            f"KV cache: {cache_reason}",
        ),
    )


def _cache_bytes(model: ModelFacts, given: Given) -> int:
    """Memory that flags give to the cache; 0: none."""
    if given.cache_tokens is not None:
        return int(given.cache_tokens * model.token_bytes)
    return given.cache_bytes or 0


def _step_tokens(model: ModelFacts, room: int) -> tuple[int, str]:
    """The largest step whose activations take no more than their share of the room."""
    tokens, each = GPU_STEP_TOKENS, _activation_bytes(model)
    while tokens > _LEAST_STEP_TOKENS and tokens * each * _STEP_SHARE > room:
        tokens //= 2
    if tokens == GPU_STEP_TOKENS:
        return tokens, "the most that was measured"
    return tokens, f"its activations take {_gib(tokens * each)} of the {_gib(max(0, room))} that the weights leave"


def _running(model: ModelFacts, cache: int) -> tuple[int, str]:
    """How many requests of ``REQUEST_TOKENS`` the cache holds, within bounds, and why it is that many."""
    length = min(REQUEST_TOKENS, model.context_length)
    states = _STATES_EACH * model.state_bytes
    fit = int(cache / (length * model.token_bytes + states))
    if fit >= GPU_RUNNING:
        return GPU_RUNNING, f"the most that was measured; the cache holds {length} tokens of about {fit} requests"
    running = max(_LEAST_RUNNING, fit // 8 * 8)
    return running, f"the cache holds {length} tokens of about {fit} requests"


def _activation_bytes(model: ModelFacts) -> int:
    """What a token of a step takes besides its place in the cache, about: two bytes a number."""
    return 2 * _SPARE * (6 * model.hidden_size + 4 * model.intermediate_size)


def _gib(count: int) -> str:
    return f"{count / _GIB:.1f} GiB"
