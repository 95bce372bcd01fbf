"""Chooses the scales of a float8 cache: runs a trial prompt through the model and takes each layer's largest key and value.

float8_e4m3 holds numbers from 2^-9 to 448, with full precision from 2^-6 on, so nearly every layer's keys and values fit as they
are. A layer gets a scale other than 1 only if its largest number in the trial is under 2, where many would be too small, or over
224, where other prompts could exceed the range. Scales are powers of 2, so that scaling adds no rounding. Numbers beyond the
range are clamped, never made infinite. If a checkpoint stores a layer's scales, those are used instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from sapwood_kernels import reference
from sapwood_kernels.kv_destination import KVDestination
from sapwood_worker.model.attention.backend import AttentionLayer
from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.decoder import DecoderModel
from sapwood_worker.model.pools.device_pool import KVScales
from sapwood_worker.model.pools.state_pool import StatePlan, StatePool, StateRun
from sapwood_worker.records.kv_layout import KVLayout

_TOKENS = 256
_LOW, _HIGH, _WANTED = 2.0, 224.0, 32.0


def scale_for(largest: float) -> float:
    """The scale of numbers up to ``largest``: a power of 2."""
    if _LOW <= largest <= _HIGH or largest == 0.0 or not math.isfinite(largest):
        return 1.0
    return float(2.0 ** round(math.log2(largest / _WANTED)))


class TrialPlan:
    """Implements :class:`sapwood_worker.model.attention.backend.AttentionPlan` for one prompt, without a cache.

    Args:
        layout: What the layers keep.
        count: Tokens of the prompt.
        dtype: The dtype of keys and values here.
        device: Where they go.

    Attributes:
        largest: For each layer that has attended, float32 [2]: its largest key and value.
        states: States that begin with zeros; None: no layer keeps one.
    """

    absorbed = None

    def __init__(self, layout: KVLayout, count: int, dtype: torch.dtype, device: torch.device) -> None:
        self.largest: dict[int, Tensor] = {}
        self._stored: dict[int, KVDestination] = {}
        slots = torch.arange(count, device=device)
        self.states: StatePlan | None = None
        for each in layout.states:
            run = StateRun(torch.zeros(1, dtype=torch.int64, device=device), slice(0, count), None)
            self.states = StatePlan(StatePool(each.layers, 1, 0, each.heads * each.dim, device), [run])
        for each in layout.paged:
            keys, *values = torch.zeros((each.parts, 1, count, each.heads, each.dim), dtype=dtype, device=device)
            self._stored.update(dict.fromkeys(each.layers, KVDestination(keys, values[0] if values else keys, slots)))

    def destination(self, layer: AttentionLayer) -> KVDestination:
        return self._stored[layer.index]

    def attend_cached(self, layer: AttentionLayer, query: Tensor) -> Tensor:
        stored = self.destination(layer)
        self.largest[layer.index] = torch.stack([each.float().abs().amax() for each in (stored.keys, stored.values)])
        if layer.latent is not None:
            result = reference.latent_attention(query, stored.keys[0, :, 0], layer.latent.up, scale=layer.scale)
        else:
            result = reference.attention(
                query,
                stored.keys[0],
                stored.values[0],
                scale=layer.scale,
                window=layer.window,
                softcap=layer.softcap,
                sinks=layer.sinks,
            )
        return result.flatten(1)


def kv_scales(
    stored: Mapping[int, tuple[float, float]],
    model: DecoderModel,
    config: ModelConfig,
    layout: KVLayout,
    dtype: torch.dtype,
    device: torch.device,
) -> KVScales:
    """The scales for a model's cache: from its checkpoint, or for layers without stored scales from :func:`calibrate`.

    For layers of other pipeline stages they are 0.

    Args:
        stored: For each layer, the stored scales of keys and of values.
        model, and the rest: see :func:`calibrate`.
    """
    found = dict(stored)
    if len(found) < config.num_layers:
        calibrated = calibrate(model, config, layout, dtype, device)
        found = {layer: found.get(layer, calibrated.of(layer)) for layer in model.own}
    keys, values = zip(
        *(found[layer] if layer in model.own else (0.0, 0.0) for layer in range(config.num_layers)), strict=True
    )
    return KVScales(keys, values)


@torch.inference_mode()
def calibrate(
    model: DecoderModel, config: ModelConfig, layout: KVLayout, dtype: torch.dtype, device: torch.device
) -> KVScales:
    """The scales for a model's cache, by a prompt of pseudo-random tokens that is always the same.

    Args:
        model: The model, ready to run.
        config: Its configuration.
        layout: What its layers keep.
        dtype: The dtype of its activations.
        device: The device it is on.
    """
    count = min(_TOKENS, config.max_position)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (count,), generator=generator).to(device)
    plan = TrialPlan(layout, count, dtype, device)
    model(tokens, torch.arange(count, device=device), plan)
    attending = [i for i in model.own if config.attends(i)]
    largest = {i: plan.largest[i].tolist() for i in attending}
    pairs = [largest.get(i, (0.0, 0.0)) for i in range(config.num_layers)]
    return KVScales(
        tuple(scale_for(key) for key, _ in pairs),
        tuple(scale_for(value) for _, value in pairs),
    )
