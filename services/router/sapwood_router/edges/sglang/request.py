"""What ``/generate`` is asked for, as requests of the pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.contract.seeds import Seeds
from sapwood_common.errors import InvalidArgumentError
from sapwood_common.grammar.source import GrammarKind
from sapwood_net.pacing.heavy_work import A_FEW
from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.http.json_body import Neutral, convert
from sapwood_router.edges.openai.parameters import TEXT_SAMPLING, sampling_of
from sapwood_router.edges.sglang.logprobs import LogprobsRequest, LogprobsWish
from sapwood_router.flow.generation import Pipeline
from sapwood_router.request.context import (
    AnswerGrammar,
    FieldNames,
    PictureSource,
    Prompt,
    RequestContext,
    TextPrompt,
    TokenPrompt,
    picture_file,
    unique_id,
)
from sapwood_router.request.output import OutputOptions
from sapwood_router.request.tokens import are_tokens
from sapwood_router.request.validation import continuations

_SETTINGS = "sampling_params."
DEFAULT_MAX_NEW_TOKENS = 128
MOST_CHOICES = 1024
NEUTRAL: Neutral = {
    "token_ids_logprob": (),
    "input_embeds": (),
    "audio_data": ([],),
    "video_data": ([],),
    "modalities": ([],),
    "session_params": ({},),
    "custom_logit_processor": ("",),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "data_parallel_rank": (),
}
"""Parameters that are taken only with the values that ask for nothing."""
IGNORED = frozenset({"log_metrics", "no_logs"})
"""Never change an answer here."""
SETTINGS_NEUTRAL: Neutral = {
    "spaces_between_special_tokens": (True,),
    "stop_regex": ([], ""),
    "custom_params": ({},),
    "stream_interval": (),
}
"""The same within ``sampling_params``."""
_RENAMED = {"min_new_tokens": "min_tokens", "sampling_seed": "seed"}
"""SGLang's names of sampling settings that are called otherwise here."""


class GenerateRequest(LogprobsRequest, kw_only=True):
    """``POST /generate``; ``model`` is an extension."""

    text: str | list[str] | None = None
    input_ids: list[Any] | None = None  # token ids, or lists of them: told apart below
    sampling_params: dict[str, Any] | None = None
    stream: bool | None = None
    lora_path: str | list[str | None] | None = None
    image_data: Any = None  # a picture, a list of a text's, or a list of such lists: told apart below


class _Settings(msgspec.Struct):
    """``sampling_params``, except those that are sampling settings of the same name."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    sampling_seed: int | None = None
    stop: str | list[str] | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    n: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    token_healing: bool | None = None  # an extension


def is_prompt_only(settings: Mapping[str, Any] | None) -> bool:
    """Whether nothing is to be generated: the prompt is computed, for its log probabilities or for the cache."""
    return (settings or {}).get("max_new_tokens") == 0


async def contexts_of(
    request: GenerateRequest, wish: LogprobsWish | None, exchange: Exchange, deadline: float, pipeline: Pipeline
) -> tuple[list[RequestContext], bool]:
    """One context for each answer, those of a prompt together, made a few a turn; and whether the answer is a list of them.

    Raises:
        InvalidArgumentError: Something is wrong; the field is named.
    """
    request_id, seeds = exchange.request_id, pipeline.seeds
    given = request.sampling_params or {}
    settings = convert(given, _Settings, SETTINGS_NEUTRAL, TEXT_SAMPLING, prefix=_SETTINGS, left_out=exchange.left_out)
    grammar, grammar_field = _grammar(settings)
    stop = [settings.stop] if isinstance(settings.stop, str) else settings.stop or ()
    named = _prompts(request)
    count = 1 if settings.n is None else settings.n
    if len(named) * max(1, count) > MOST_CHOICES:
        raise InvalidArgumentError(f"at most {MOST_CHOICES} answers a request", field=named[-1][0])
    loras = _loras(request, len(named))
    output = OutputOptions(
        stop=tuple(stop),
        skip_special_tokens=settings.skip_special_tokens is not False,
        include_stop=settings.no_stop_trim is True,
    )
    sampling: SamplingParams | None = None
    contexts: list[RequestContext] = []
    piece = 0
    for (name, prompt), lora in zip(named, loras, strict=True):
        if len(contexts) - piece >= A_FEW:
            piece = len(contexts)
            await pipeline.heavy.turn(exchange.tenant, goes_on=True)
        fields = FieldNames(
            prompt=name,
            sampling=_SETTINGS,
            max_tokens=f"{_SETTINGS}max_new_tokens",
            grammar=grammar_field,
            stop=f"{_SETTINGS}stop",
            lora="lora_path",
            pictures=name.replace("text", "image_data", 1),
            healing=f"{_SETTINGS}token_healing",
        )
        if sampling is None:
            sampling = _sampling(given, settings, fields, seeds, wish)
        elif settings.sampling_seed is None:
            sampling = replace(sampling, seed=seeds.draw())
        contexts += [
            RequestContext(
                request_id=request_id,
                worker_request_id=unique_id(request_id),
                prompt=prompt,
                sampling=each,
                output=output,
                fields=fields,
                deadline=deadline,
                model=request.model,
                whole=not request.stream,
                grammar=grammar,
                heals=settings.token_healing is True,
                lora=lora,
            )
            for each in continuations(sampling, count, fields)
        ]
    return contexts, count > 1 or named[0][0] not in ("text", "input_ids")


def _sampling(
    given: dict[str, Any], settings: _Settings, fields: FieldNames, seeds: Seeds, wish: LogprobsWish | None
) -> SamplingParams:
    """The settings of the first prompt; those of the others have other seeds, if none is given."""
    own = {ours: given[theirs] for theirs, ours in _RENAMED.items() if theirs in given}
    if wish is not None:
        own |= wish.settings()
    wanted = DEFAULT_MAX_NEW_TOKENS if settings.max_new_tokens is None else settings.max_new_tokens
    if is_prompt_only(given):
        wanted = 1  # a worker generates at least one; it is dropped
    try:
        return sampling_of(given, fields, seeds, max_tokens=wanted, **own)
    except InvalidArgumentError as error:
        raise _renamed(error, given) from error


def _renamed(error: InvalidArgumentError, given: dict[str, Any]) -> InvalidArgumentError:
    """The same with the field as SGLang calls it."""
    if error.field in (f"{_SETTINGS}logprobs", f"{_SETTINGS}prompt_logprobs"):
        what = error.message.removeprefix(error.field.removeprefix(_SETTINGS))
        return InvalidArgumentError(f"top_logprobs_num{what}", field="top_logprobs_num")
    for theirs, ours in _RENAMED.items():
        if theirs in given and error.field == f"{_SETTINGS}{ours}":
            return InvalidArgumentError(error.message, field=f"{_SETTINGS}{theirs}")
    return error


def _grammar(settings: _Settings) -> tuple[AnswerGrammar | None, str]:
    kinds: tuple[tuple[GrammarKind, str | None], ...] = (
        ("json_schema", settings.json_schema),
        ("regex", settings.regex),
        ("ebnf", settings.ebnf),
        ("structural_tag", settings.structural_tag),
    )
    wanted = [(kind, text) for kind, text in kinds if text is not None]
    if not wanted:
        return None, ""
    if len(wanted) > 1:
        names = ", ".join(kind for kind, _ in wanted)
        raise InvalidArgumentError(f"only one of {names} can be set", field=f"{_SETTINGS}{wanted[1][0]}")
    ((kind, text),) = wanted
    return AnswerGrammar(kind, text, lenient=kind == "json_schema"), f"{_SETTINGS}{kind}"


def _prompts(request: GenerateRequest) -> list[tuple[str, Prompt]]:
    """The prompts, each with the client's name of it."""
    if (request.text is None) == (request.input_ids is None):
        both = "" if request.text is None else ", and both are given"
        raise InvalidArgumentError(f"either text or input_ids is required{both}", field="text")
    if request.image_data and request.text is None:
        raise InvalidArgumentError("image_data goes with text", field="image_data")
    if isinstance(request.text, str):
        return [("text", TextPrompt(request.text, pictures=_pictures(request.image_data, "image_data")))]
    if request.text is not None:
        _check_some(request.text, "text")
        shown = request.image_data or [None] * len(request.text)
        if not isinstance(shown, list) or len(shown) != len(request.text):
            raise InvalidArgumentError("image_data has a list for each text", field="image_data")
        return [
            (f"text[{index}]", TextPrompt(text, pictures=_pictures(images, f"image_data[{index}]")))
            for index, (text, images) in enumerate(zip(request.text, shown, strict=True))
        ]
    assert request.input_ids is not None
    if request.input_ids and are_tokens(request.input_ids):
        return [("input_ids", TokenPrompt(request.input_ids))]
    _check_some(request.input_ids, "input_ids")
    for index, item in enumerate(request.input_ids):
        if not (isinstance(item, list) and item and are_tokens(item)):
            raise InvalidArgumentError("it must be token ids", field=f"input_ids[{index}]")
    return [(f"input_ids[{index}]", TokenPrompt(item)) for index, item in enumerate(request.input_ids)]


def _pictures(given: Any, field: str) -> tuple[PictureSource, ...]:
    """A text's pictures: URLs or base64, or objects with a ``url``."""
    images = given if isinstance(given, list) else [] if given is None else [given]
    found = []
    for index, image in enumerate(images):
        name = f"{field}[{index}]" if isinstance(given, list) else field
        url = image.get("url") if isinstance(image, dict) else image
        if not isinstance(url, str):
            raise InvalidArgumentError("a picture is a URL or base64", field=name)
        found.append(PictureSource(url) if ":" in url[:8] else picture_file(url, name))
    return tuple(found)


def _loras(request: GenerateRequest, count: int) -> list[str]:
    """The name of each prompt's adapter; empty: none. It is a name, whatever SGLang calls it: clients load nothing by it."""
    given = request.lora_path
    if not isinstance(given, list):
        return [given or ""] * count
    if len(given) != count:
        raise InvalidArgumentError(f"there are {count} prompts and {len(given)} adapters", field="lora_path")
    return [each or "" for each in given]


def _check_some(prompts: list[Any], field: str) -> None:
    if not 0 < len(prompts) <= MOST_CHOICES:
        raise InvalidArgumentError(f"1 to {MOST_CHOICES} prompts, got {len(prompts)}", field=field)
