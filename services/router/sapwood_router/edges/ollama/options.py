"""``options``, ``format`` and ``think``, as the pipeline takes them."""

from __future__ import annotations

from typing import Any

import msgspec

from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.contract.seeds import Seeds
from sapwood_common.errors import InvalidArgumentError
from sapwood_router.edges.http.json_body import convert
from sapwood_router.edges.http.left_out import LeftOut
from sapwood_router.edges.ollama.types import OllamaRequest
from sapwood_router.edges.openai.parameters import TEXT_SAMPLING, effort_variables, sampling_of
from sapwood_router.request.context import AnswerGrammar, FieldNames
from sapwood_router.request.output import OutputOptions

_PREFIX = "options."
IGNORED = frozenset(
    {
        "num_ctx",
        "num_keep",
        "num_batch",
        "num_gpu",
        "main_gpu",
        "num_thread",
        "numa",
        "low_vram",
        "f16_kv",
        "vocab_only",
    }
    | {"use_mmap", "use_mlock", "penalize_newline"}
)
"""How Ollama would load the model: never change an answer here."""
_RENAMED = {"repeat_penalty": "repetition_penalty"}
_EFFORTS = ("low", "medium", "high", "max")


class _Options(msgspec.Struct):
    """``options``, but for those that are sampling settings by the same name."""

    num_predict: int | None = None
    repeat_penalty: float | None = None
    stop: str | list[str] | None = None


def fields_of(prompt: str) -> FieldNames:
    """How clients spell the fields of errors."""
    return FieldNames(
        prompt=prompt,
        sampling=_PREFIX,
        max_tokens=f"{_PREFIX}num_predict",
        call="function.",
        reasoning="thinking",
        grammar="format",
        template_variables="think",
        stop=f"{_PREFIX}stop",
    )


def settings_of(
    given: dict[str, Any] | None, fields: FieldNames, seeds: Seeds, left_out: LeftOut
) -> tuple[SamplingParams, OutputOptions]:
    """The sampling settings, and how tokens become output.

    Raises:
        InvalidArgumentError: One is of the wrong type or out of range.
    """
    given = given or {}
    options = convert(given, _Options, {}, IGNORED | TEXT_SAMPLING, prefix=_PREFIX, left_out=left_out)
    own = {ours: given[theirs] for theirs, ours in _RENAMED.items() if given.get(theirs) is not None}
    wanted = options.num_predict
    try:
        sampling = sampling_of(
            given, fields, seeds, max_tokens=None if wanted is None or wanted < 0 else max(1, wanted), **own
        )
    except InvalidArgumentError as error:
        for theirs, ours in _RENAMED.items():
            if theirs in given and error.field == f"{_PREFIX}{ours}":
                raise InvalidArgumentError(error.message, field=f"{_PREFIX}{theirs}") from error
        raise
    stop = [options.stop] if isinstance(options.stop, str) else options.stop or ()
    return sampling, OutputOptions(stop=tuple(stop))


def grammar_of(request: OllamaRequest) -> AnswerGrammar | None:
    """What the answer must match.

    Raises:
        InvalidArgumentError: The format is none.
    """
    match request.format:
        case None | "":
            return None
        case "json":
            return AnswerGrammar("json_schema", '{"type": "object"}')
        case dict() as schema:
            return AnswerGrammar("json_schema", msgspec.json.encode(schema).decode(), lenient=True)
    raise InvalidArgumentError('format must be "json" or a JSON schema', field="format")


def template_variables(request: OllamaRequest) -> str:
    """What ``think`` means to templates.

    Raises:
        InvalidArgumentError: It is no such word.
    """
    think = request.think
    if think is None or think == "":
        return ""
    if isinstance(think, str) and think not in _EFFORTS:
        raise InvalidArgumentError(f"think must be a boolean or one of {', '.join(_EFFORTS)}", field="think")
    variables = effort_variables(think) if isinstance(think, str) else {"enable_thinking": think, "thinking": think}
    return msgspec.json.encode(variables).decode()
