"""How a request wants its tokens chosen: every sampling field with its default and its range, as router and worker share them.

``common.proto`` explains each field. docs/development.md lists what a new field touches.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from sapwood_common.contract.seeds import RANDOM_SEEDS, Seeds
from sapwood_common.errors import InvalidArgumentError

AS_MANY_AS_FIT = 2**31 - 1
"""``max_tokens`` of a request that sets none."""
MOST_LOGPROBS = 20
LONGEST_BAD_WORD = 32
"""Tokens."""
LONGEST_PARAMETERS = 16384
"""Bytes of JSON of a request's logit processors."""
_UINT64 = 2**64

TokenId = Annotated[int, Meta(ge=0, lt=2**32)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=0, le=MOST_LOGPROBS)]
Positive = Annotated[float, Meta(gt=0, le=3.5e38)]  # and finite, as is each number with an upper bound


class LogitProcessorCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A logit processor that a request asks for, by the name of its entry point, and its JSON parameters."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    parameters: dict[str, Any] = {}


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Sampling settings of one request; fields and defaults are those of ``common.proto``, except ``n``.

    Attributes:
        top_k: Keep the k most likely tokens; 0 keeps all.
        seed: With a token's position it decides the token: the same request gives the same tokens in any batch.
        max_tokens: The most tokens to generate; by default as many as the context holds.
        stop_token_ids: Generation ends at any of these; the ending token is part of the output.
        logit_bias: Token ids and what is added to their logits.
        logprobs: How many of the likeliest alternatives each output token gets, all with log probabilities; None: no log
            probabilities.
        prompt_logprobs: The same for the prompt.
        prompt_logprobs_start: The place of the prompt's token after which ``prompt_logprobs`` begin.
        allowed_token_ids: The only tokens that may be generated; empty: all.
        bad_words_ids: Sequences whose last token may not follow the others in the output.
        speculate: Whether tokens may be drafted, where the worker does that.
        usual: Settings in ``OF_MODELS`` that the request itself sets to the usual value, so that the model's own default does not
            take their place. No request has it: it is found out.
        logit_processors: Functions of the worker's operator that change the logits first, one after another.
    """

    temperature: Annotated[float, Meta(ge=0, le=3.5e38)] = 1.0
    top_k: Annotated[int, Meta(ge=1, le=2**31 - 1)] = 0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    seed: int = 0
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] = AS_MANY_AS_FIT
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=1024)] = ()
    ignore_eos: bool = False
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    repetition_penalty: Positive = 1.0
    logit_bias: Annotated[dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] = {}
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    logprobs: Count | None = None
    prompt_logprobs: Count | None = None
    prompt_logprobs_start: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    allowed_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=65536)] = ()
    bad_words_ids: Annotated[
        tuple[Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=LONGEST_BAD_WORD)], ...],
        Meta(max_length=512),
    ] = ()
    speculate: bool = True
    logit_processors: Annotated[tuple[LogitProcessorCall, ...], Meta(max_length=8)] = ()
    usual: tuple[str, ...] = ()

    def draws(self) -> SamplingParams:
        """The settings that decide a token by its logits and position alone, whatever came before."""
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            logit_bias=self.logit_bias,
        )

    def applied(self, defaults: Mapping[str, float]) -> SamplingParams:
        """The settings with a model's own defaults, where the request does not say otherwise."""
        absent = {
            name: value
            for name, value in defaults.items()
            if name not in self.usual and getattr(self, name) == OF_MODELS[name]
        }
        return msgspec.structs.replace(self, **absent) if absent else self

    def tokens(self) -> Iterator[tuple[str, int]]:
        """Each token id that a field names, with the field."""
        for token in self.stop_token_ids:
            yield "stop_token_ids", token
        for token in self.logit_bias:
            yield "logit_bias", token
        for token in self.allowed_token_ids:
            yield "allowed_token_ids", token
        for sequence in self.bad_words_ids:
            for token in sequence:
                yield "bad_words_ids", token


USUAL = SamplingParams()
"""The settings of a request that sets none."""

FIELDS = frozenset(SamplingParams.__struct_fields__) - {"usual"}

OF_MODELS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Settings whose usual value, which is here, a model's files may replace."""

_KINDS = {each.name: each.type for each in msgspec.structs.fields(SamplingParams)}
_MOST_SEARCHED, _MOST_KEYS, _LONGEST_KEY = 4096, 8, 40
"""Keys that are looked at for an error, keys that it names, and characters of one."""

_PLACE = re.compile(r"`\$\.(?P<name>\w+)(?P<inner>[^`]*)`$")
"""Finds in msgspec's message the field that is wrong."""


def read_sampling(
    given: Mapping[str, Any],
    done: int = 0,
    seeds: Seeds = RANDOM_SEEDS,
    defaults: Mapping[str, float] | None = None,
) -> SamplingParams:
    """Checked settings; an absent seed is drawn.

    Args:
        given: Fields by name. Keys of ``logit_bias`` may be decimal text.
        done: Tokens that were generated before; ``min_tokens`` counts them, ``max_tokens`` does not.
        seeds: Draws the seed.
        defaults: The model's own, for settings in ``OF_MODELS`` that are absent; a ``top_k`` of 0 is there, and keeps all. None:
            who serves the model adds them later.

    Raises:
        InvalidArgumentError: A value is of the wrong type or out of range; names the field as ``sampling.NAME``.
    """
    if "seed" not in given:
        given = {**given, "seed": seeds.draw()}
    if defaults is not None:
        given = {**defaults, **given}
        if given.get("top_k") == 0:
            given = {name: value for name, value in given.items() if name != "top_k"}
    try:
        params = msgspec.convert(given, SamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        raise _explained(str(error), given) from error
    if params.min_tokens > params.max_tokens + done:
        raise _refused("min_tokens", f"must be at most max_tokens, {params.max_tokens + done}", params.min_tokens)
    if params.logit_processors and len(msgspec.json.encode(params.logit_processors)) > LONGEST_PARAMETERS:
        raise InvalidArgumentError(
            f"logit_processors has more than {LONGEST_PARAMETERS} bytes of JSON", field="sampling.logit_processors"
        )
    if not 0 <= params.seed < _UINT64:
        raise InvalidArgumentError("seed must fit 64 bits", field="sampling.seed")
    if defaults is not None:
        return params
    usual = tuple(name for name, value in OF_MODELS.items() if name in given and given[name] == value)
    return msgspec.structs.replace(params, usual=usual) if usual else params


def check_tokens(params: SamplingParams, vocab_size: int) -> None:
    """Refuses token ids that the model does not have.

    Raises:
        InvalidArgumentError: A field has such a token; the message names the field.
    """
    for name, token in params.tokens():
        if token >= vocab_size:
            raise _refused(name, f"must be of tokens below the vocabulary size {vocab_size}", token)


def _refused(name: str, expected: str, got: object) -> InvalidArgumentError:
    return InvalidArgumentError(f"{name} {expected}, got {got}", field=f"sampling.{name}")


def _short(number: Any) -> str:
    try:
        return f"{number:g}"
    except OverflowError:  # an integer that no float is near to
        return "a larger number than there can be"


def _explained(problem: str, given: Mapping[str, Any]) -> InvalidArgumentError:
    found = _PLACE.search(problem)
    if found is None:
        return InvalidArgumentError(problem, field="sampling")
    name, value = found["name"], given.get(found["name"])
    what = problem.partition(" - at ")[0]
    got = f", got {_short(value)}" if type(value) in (int, float) and "got" not in what else ""
    got += at_keys(value, _KINDS[name])
    inner = found["inner"].replace("[...]", "")  # the keys are named
    return InvalidArgumentError(f"{name}{inner}: {what[:1].lower()}{what[1:]}{got}", field=f"sampling.{name}")


def at_keys(value: object, kind: Any) -> str:
    """Names the keys of an object that are wrong, or whose values are, to stand behind an error; empty: it is no object.

    Args:
        value: What was given.
        kind: The type that it should have.
    """
    if not isinstance(value, dict):
        return ""
    wrong: list[str] = []
    for key, each in islice(value.items(), _MOST_SEARCHED):
        try:
            msgspec.convert({key: each}, kind, str_keys=True)
        except msgspec.ValidationError:
            wrong.append(repr(key[:_LONGEST_KEY]) if isinstance(key, str) else str(key))
    more = f" and {len(wrong) - _MOST_KEYS} more" if len(wrong) > _MOST_KEYS else ""
    return f", at {', '.join(wrong[:_MOST_KEYS])}{more}" if wrong else ""
