"""Checks of what a client asked for that need no other service: each raises InvalidArgumentError with the client's field."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from sapwood_common.contract.limits import LONGEST_STOP, MOST_CONTINUATIONS, MOST_STOPS
from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.errors import InvalidArgumentError
from sapwood_router.request.context import ChatPrompt, FieldNames, Prompt, RequestContext, TextPrompt

MOST_BAD_WORDS = 128
MOST_TOGETHER = 4 * 1024 * 1024
"""Characters of all prompts of a request, and of what goes with each, as often as they are continued: every run has them
tokenized, hashed, sent and kept."""
_MOST_TOOLS = 1024 * 1024
"""Characters of a conversation's tools: the tokenizer reads them for each answer, and compiles them where a call must come."""
_MOST_VARIABLES = 2 * 1024 * 1024
"""The most characters of a chat template's arguments besides the conversation; the tokenizer parses them without a pause."""
_MOST_ARGUMENTS = 1024 * 1024
"""Characters of a call's arguments: the tokenizer parses them, in one piece, for the model's template."""
_MOST_GRAMMAR = 2 * 1024 * 1024
"""The most characters of a grammar: the tokenizer's default limit is half of it, and a grammar is sent in one message."""
_CHARACTERS_A_TOKEN, _CHARACTERS_A_TURN = 4, 32
_UINT32 = 2**32


def extent(prompt: Prompt) -> int:
    """About how many characters a prompt has."""
    if isinstance(prompt, TextPrompt):
        return len(prompt.text) + len(prompt.suffix)
    if isinstance(prompt, ChatPrompt):
        said = sum(len(turn.content or "") + len(turn.reasoning or "") for turn in prompt.turns)
        said += sum(len(call.arguments) for turn in prompt.turns for call in turn.tool_calls)
        return said + _CHARACTERS_A_TURN * len(prompt.turns) + len(prompt.tools) + len(prompt.template_variables)
    return _CHARACTERS_A_TOKEN * len(prompt.token_ids)


def check_together(contexts: Sequence[RequestContext]) -> None:
    """Refuses a request whose prompts, or a grammar and what else goes with each of them, are long and continued so often that
    they come to more than any one could. A prompt with log probabilities counts once more for each alternative.
    """
    if len(contexts) == 1:
        return
    alternatives = contexts[0].sampling.prompt_logprobs or 0
    total = sum(extent(context.prompt) for context in contexts) * (1 + alternatives)
    if total <= MOST_TOGETHER:  # what goes with them is the same for all
        total += len(contexts) * _extent_beside(contexts[0])
    if total > MOST_TOGETHER:
        beside = f", and {alternatives} log probabilities of it as often again" if alternatives else ""
        raise InvalidArgumentError(
            f"the prompts and what goes with each, as often as they are continued, have {total} characters (a token counts for "
            f"{_CHARACTERS_A_TOKEN}{beside}); the most are {MOST_TOGETHER}",
            field=contexts[0].fields.prompt,
        )


def _extent_beside(context: RequestContext) -> int:
    """About how many characters a choice has of its own beside its prompt."""
    sampling, grammar = context.sampling, context.grammar
    texts = sum(map(len, context.output.stop)) + sum(map(len, context.bad_words))
    tokens = len(sampling.stop_token_ids) + len(sampling.logit_bias) + len(sampling.allowed_token_ids)
    return texts + _CHARACTERS_A_TOKEN * tokens + (0 if grammar is None else len(grammar.text))


def check_prompt(prompt: Prompt, fields: FieldNames) -> None:
    """Refuses an empty prompt and token ids that are no token ids."""
    if isinstance(prompt, TextPrompt):
        if not prompt.text and not prompt.suffix:
            raise InvalidArgumentError(
                "the prompt is empty; it needs a text of one letter at least", field=fields.prompt
            )
    elif isinstance(prompt, ChatPrompt):
        if not prompt.turns:
            raise InvalidArgumentError("the conversation is empty; it needs a message at least", field=fields.prompt)
        if len(prompt.tools) > _MOST_TOOLS:
            raise InvalidArgumentError(
                f"the tools have {len(prompt.tools)} characters; the most are {_MOST_TOOLS}", field="tools"
            )
        if len(prompt.template_variables) > _MOST_VARIABLES:
            raise InvalidArgumentError(
                f"the template's variables have {len(prompt.template_variables)} characters; the most are {_MOST_VARIABLES}",
                field=fields.template_variables,
            )
        for turn in prompt.turns:
            for call in turn.tool_calls:
                check_arguments(call.arguments, fields.prompt)
    else:
        check_token_ids(prompt.token_ids, fields.prompt)


def check_token_ids(token_ids: Sequence[int], field: str) -> None:
    """Refuses none at all, and what is no token id."""
    if not token_ids:
        raise InvalidArgumentError("the prompt is empty; it needs a token at least", field=field)
    if not 0 <= min(token_ids) <= max(token_ids) < _UINT32:
        raise InvalidArgumentError("token ids must be in 0..4294967295", field=field)


def check_arguments(text: str, field: str) -> None:
    """Refuses arguments of a call that are very long."""
    if len(text) > _MOST_ARGUMENTS:
        raise InvalidArgumentError(
            f"the arguments of a call have {len(text)} characters; the most are {_MOST_ARGUMENTS}", field=field
        )


def check_grammar(text: str, field: str) -> None:
    """Refuses a grammar that no tokenizer would compile: it would be copied and written in one piece."""
    if len(text) > _MOST_GRAMMAR:
        raise InvalidArgumentError(
            f"the grammar has {len(text)} characters; the most are {_MOST_GRAMMAR}", field=field or "grammar"
        )


def check_counts(stops: int, bad_words: int, field: str = "stop") -> None:
    """Refuses more than 16 stop strings, and too many bad words: before they are looked at, as there may be millions."""
    if stops > MOST_STOPS:
        raise InvalidArgumentError(f"at most {MOST_STOPS} stop strings, got {stops}", field=field)
    if bad_words > MOST_BAD_WORDS:
        raise InvalidArgumentError(f"at most {MOST_BAD_WORDS} bad words, got {bad_words}", field="bad_words")


def check_stop(stop: tuple[str, ...], field: str = "stop") -> None:
    """Refuses more than 16 stop strings, an empty one, and a long one."""
    if not stop:
        return
    check_counts(len(stop), 0, field)
    if not all(stop):
        raise InvalidArgumentError("a stop string is empty; leave it out", field=field)
    _check_longest(stop, "a stop string", field)


def check_bad_words(words: tuple[str, ...]) -> None:
    """Refuses too many bad words, an empty one, and a long one."""
    if not words:
        return
    check_counts(0, len(words))
    if not all(map(str.strip, words)):
        raise InvalidArgumentError("a bad word is empty", field="bad_words")
    _check_longest(words, "a bad word", "bad_words")


def _check_longest(texts: tuple[str, ...], what: str, field: str) -> None:
    longest = max(map(len, texts), default=0)
    if longest > LONGEST_STOP:
        raise InvalidArgumentError(f"{what} has {longest} characters; the most are {LONGEST_STOP}", field=field)


def check_truncation(tokens: int, field: str = "truncate_prompt_tokens") -> None:
    """Refuses a prompt that nothing, or more than anything, would be left of."""
    if tokens != -1 and not 1 <= tokens < 2**31:
        raise InvalidArgumentError(f"{field} must be at least 1, or -1, got {tokens}", field=field)


def check_whole_prompt(prompt: Prompt) -> None:
    """Refuses to cut a prompt whose ends must stay."""
    if isinstance(prompt, TextPrompt) and prompt.suffix:
        raise InvalidArgumentError("a prompt with a suffix is not cut", field="truncate_prompt_tokens")


def check_tokens_only(prompt: Prompt, stop: tuple[str, ...]) -> None:
    """Refuses what needs the text of an answer that is to be token ids alone."""
    if stop:
        raise InvalidArgumentError("stop needs the text, which detokenize false leaves out", field="stop")
    if isinstance(prompt, ChatPrompt) and prompt.tools:
        raise InvalidArgumentError("tools need the text, which detokenize false leaves out", field="tools")


def check_session(context: RequestContext) -> None:
    """Refuses fields that a request that continues a session cannot have."""
    prompt = context.prompt
    if isinstance(prompt, ChatPrompt):
        raise InvalidArgumentError("a session goes on with text or tokens, not with messages", field="session")
    if isinstance(prompt, TextPrompt) and prompt.suffix:
        raise InvalidArgumentError("suffix does not go with a session", field="suffix")
    if context.truncation is not None:
        raise InvalidArgumentError("a session's prompt is not cut", field="truncate_prompt_tokens")


def check_n(n: int, fields: FieldNames) -> None:
    """Refuses a number of continuations out of range."""
    if not 1 <= n <= MOST_CONTINUATIONS:
        raise InvalidArgumentError(f"n must be in 1..{MOST_CONTINUATIONS}, got {n}", field=f"{fields.sampling}n")


_UINT64 = 2**64


def continuations(sampling: SamplingParams, count: int, fields: FieldNames) -> list[SamplingParams]:
    """The settings of each: the seed is the first one's, and counts up.

    Raises:
        InvalidArgumentError: ``count`` is out of range.
    """
    check_n(count, fields)
    if count == 1:
        return [sampling]
    return [replace(sampling, seed=(sampling.seed + index) % _UINT64) for index in range(count)]
