"""Sampling settings as a message of ``common.proto``, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from sapwood.v1 import common_pb2
from sapwood_common.contract.json_text import decode
from sapwood_common.contract.sampling import OF_MODELS, SamplingParams, read_sampling
from sapwood_common.contract.seeds import RANDOM_SEEDS, Seeds
from sapwood_common.errors import InvalidArgumentError

_MOST_PARAMETERS = 64 * 1024
"""The most characters of all arguments to logit processors."""


def _called(calls: Iterable[common_pb2.LogitProcessor]) -> list[dict[str, Any]]:
    size = sum(len(call.parameters) for call in calls)
    if size > _MOST_PARAMETERS:
        raise InvalidArgumentError(
            f"logit_processors: their parameters have {size} characters; the most are {_MOST_PARAMETERS}",
            field="sampling.logit_processors",
        )
    try:
        return [{"name": call.name, "parameters": decode(call.parameters or "{}")} for call in calls]
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidArgumentError(
            f"logit_processors: parameters are not JSON: {error}", field="sampling.logit_processors"
        ) from error


_REPEATED: dict[str, Callable[[Any], Any]] = {
    "stop_token_ids": tuple,
    "logit_bias": dict,
    "allowed_token_ids": tuple,
    "bad_words_ids": lambda sequences: tuple(tuple(sequence.ids) for sequence in sequences),
    "logit_processors": _called,
}
"""Converts the fields that hold several values."""


def from_message(
    message: common_pb2.SamplingParams,
    done: int = 0,
    seeds: Seeds = RANDOM_SEEDS,
    defaults: Mapping[str, float] | None = None,
) -> tuple[SamplingParams, int]:
    """Checked settings, and the number of continuations; ``done`` tokens were generated before, ``seeds`` draws an absent seed.

    ``defaults`` are the model's, as :func:`read_sampling` takes them.

    Raises:
        InvalidArgumentError: A value is of the wrong type or out of range; names the field as ``sampling.NAME``.
    """
    given: dict[str, Any] = {field.name: value for field, value in message.ListFields()}
    for name in given.keys() & _REPEATED:
        given[name] = _REPEATED[name](given[name])
    count = given.pop("n", 1)
    return read_sampling(given, done, seeds, defaults), count


def to_message(params: SamplingParams) -> common_pb2.SamplingParams:
    """The message of the settings that differ from the defaults, or that the request set to them, and of the seed."""
    given = msgspec.to_builtins(params)
    given.pop("usual", None)
    given |= {name: OF_MODELS[name] for name in params.usual}
    given["seed"] = params.seed
    if params.bad_words_ids:
        given["bad_words_ids"] = [common_pb2.TokenIds(ids=ids) for ids in params.bad_words_ids]
    if params.logit_processors:
        given["logit_processors"] = [
            common_pb2.LogitProcessor(name=call.name, parameters=msgspec.json.encode(call.parameters).decode())
            for call in params.logit_processors
        ]
    return common_pb2.SamplingParams(**given)
