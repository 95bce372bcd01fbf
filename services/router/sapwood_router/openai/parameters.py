"""The sampling parameters of OpenAI's API, as the pipeline takes them."""

from __future__ import annotations

from sapwood_common.errors import InvalidArgumentError
from sapwood_router.context import Sampling
from sapwood_router.openai.types import SamplingRequest
from sapwood_router.output import OutputOptions

_UINT64 = 2**64


def sampling_of(request: SamplingRequest, max_tokens: int | None, logprobs: int | None) -> Sampling:
    """Sampling settings; ranges are checked by the pipeline.

    ``top_k`` of 0 or -1 keeps all, as with vLLM and SGLang. OpenAI's seed is signed: the same bits are meant.

    Args:
        request: The request.
        max_tokens: The most tokens to generate.
        logprobs: How many alternatives each token's probability comes with; None: no probabilities.
    """
    seed = request.seed
    if seed is not None and not -_UINT64 // 2 <= seed < _UINT64:
        raise InvalidArgumentError("seed must fit 64 bits", field="seed")
    return Sampling(
        temperature=request.temperature,
        top_k=None if request.top_k in (0, -1) else request.top_k,
        top_p=request.top_p,
        min_p=request.min_p,
        seed=None if seed is None else seed % _UINT64,
        max_tokens=max_tokens,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=request.ignore_eos,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias=_logit_bias(request.logit_bias or {}),
        min_tokens=request.min_tokens,
        logprobs=logprobs,
    )


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    if not all(key.isascii() and key.isdecimal() for key in given):
        raise InvalidArgumentError("the keys of logit_bias must be token ids", field="logit_bias")
    return {int(key): value for key, value in given.items()}


def output_of(request: SamplingRequest) -> OutputOptions:
    """How tokens become output."""
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or ()
    return OutputOptions(stop=tuple(stop), skip_special_tokens=request.skip_special_tokens is not False)


def wants_stream(request: SamplingRequest) -> tuple[bool, bool]:
    """Whether to stream, and whether with usage.

    Raises:
        InvalidArgumentError: Options for a stream, but no stream; or an option that is not supported.
    """
    if request.stream_options is None:
        return bool(request.stream), False
    if not request.stream:
        raise InvalidArgumentError("stream_options is only allowed with stream", field="stream_options")
    if request.stream_options.include_obfuscation:
        name = "stream_options.include_obfuscation"
        raise InvalidArgumentError(f"{name} is not supported", field=name)
    return True, request.stream_options.include_usage
