"""Stage 1: the prompt becomes token ids, and it is settled what the output must match and how it will be parsed.

Before it a request takes a place in the queue, so that a refused request costs no tokenization.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from msgspec.structs import replace

from sapwood_common.contract.sampling import AS_MANY_AS_FIT, LONGEST_BAD_WORD
from sapwood_common.errors import (
    InvalidArgumentError,
    PromptTooLongError,
    SapwoodError,
)
from sapwood_net.pacing.heavy_work import Stint
from sapwood_router.fleet.registry import Registry
from sapwood_router.flow.healing import check_healing, heal
from sapwood_router.request.context import ChatPrompt, RequestContext, TextPrompt, TokenPrompt, Turn, has_strict_tool
from sapwood_router.request.field_names import to_client_field
from sapwood_router.request.tokens import MANY, TokenIds, pieces
from sapwood_router.request.validation import (
    check_bad_words,
    check_grammar,
    check_prompt,
    check_session,
    check_stop,
    check_token_ids,
    check_tokens_only,
    check_truncation,
    check_whole_prompt,
)
from sapwood_router.tokenizer.client import EncodedChat, TokenizerClient, to_compile_request

_LONGEST_NOTICE = 300

TOOLS_HIDDEN = "the chat template of this model does not show tools: the model was not told which there are"


async def prepare(context: RequestContext, tokenizer: TokenizerClient, registry: Registry, stint: Stint) -> None:
    """Checks the request and fills ``token_ids``, ``compiled_grammar`` and, for a conversation, the parsers in ``output``.

    Args:
        context: The request.
        tokenizer: The model's.
        registry: Knows the model's context.
        stint: Whose turns the pieces of a long prompt have.

    Raises:
        InvalidArgumentError: A field is malformed or out of range.
        SapwoodError: As the tokenizer service answers.
    """
    if isinstance(context.prompt, TokenPrompt) and len(context.prompt.token_ids) > MANY:
        await _check_many(context.prompt.token_ids, context, registry, stint)
    else:
        check_prompt(context.prompt, context.fields)
    if context.session is not None:
        check_session(context)
    if context.grammar is not None:
        check_grammar(context.grammar.text, context.fields.grammar)
    check_stop(context.output.stop, context.fields.stop)
    if context.output.stop and context.sampling.min_tokens:
        context.output = replace(context.output, min_tokens=context.sampling.min_tokens)
    check_bad_words(context.bad_words)
    if context.truncation is not None:
        check_truncation(context.truncation.tokens)
        check_whole_prompt(context.prompt)
    if not context.detokenize:
        check_tokens_only(context.prompt, context.output.stop)
    if context.heals:
        check_healing(context)
    prompt = context.prompt
    try:
        if isinstance(prompt, TextPrompt) and prompt.suffix:
            await _prepare_gap(context, prompt, tokenizer, registry, stint)
        elif isinstance(prompt, TextPrompt) and prompt.pictures:
            encoded = await tokenizer.encode_seen(
                prompt,
                context.request_id,
                context.deadline,
                context.caller.cache_salt,
                stint,
                most_tokens=_most_tokens(context, registry),
            )
            context.token_ids, context.pictures = encoded.token_ids, encoded.pictures
        elif isinstance(prompt, TextPrompt) and context.session is not None and context.session.tokens:
            added = await tokenizer.encode_texts(
                [prompt.text], context.request_id, context.deadline, context.caller.cache_salt, stint, add_special=False
            )
            context.token_ids = [*context.session.tokens, *added[0]]
        elif isinstance(prompt, TextPrompt):
            token_ids = await tokenizer.encode_text(
                prompt.text,
                context.request_id,
                context.deadline,
                context.caller.cache_salt,
                stint,
                add_special=prompt.add_special,
                most_tokens=_most_tokens(context, registry),
            )
            context.token_ids = _cut(token_ids, context, registry)
        elif isinstance(prompt, ChatPrompt):
            await _prepare_chat(context, prompt, tokenizer, registry, stint)
        else:
            held = () if context.session is None else context.session.tokens
            context.token_ids = _cut([*held, *prompt.token_ids] if held else prompt.token_ids, context, registry)
        if context.bad_words:
            sequences = await _bad_words(context, tokenizer)
            context.sampling = replace(context.sampling, bad_words_ids=sequences)
        if context.heals:
            await heal(context, tokenizer)
        if context.grammar is not None and not isinstance(prompt, ChatPrompt):
            await _compile(context, tokenizer)
    except SapwoodError as error:
        raise to_client_field(error, context.fields) from error


async def _check_many(token_ids: Sequence[int], context: RequestContext, registry: Registry, stint: Stint) -> None:
    """Looks at a long prompt only if it fits, and lets others go on now and then."""
    most = _most_tokens(context, registry)
    if most is not None and len(token_ids) > most():
        raise PromptTooLongError.of(len(token_ids), most(), field=context.fields.prompt)
    for piece in pieces(token_ids):
        check_token_ids(piece, context.fields.prompt)
        await stint.pause()


def _most_tokens(context: RequestContext, registry: Registry) -> Callable[[], int] | None:
    """Says beyond how many tokens no worker takes the prompt; None: it is cut."""
    return None if context.truncation else lambda: registry.context_length(registry.resolve(context.model))


def _room(context: RequestContext, registry: Registry) -> int:
    """Tokens of a prompt that leave room for the answer; clients ask for more than they need, so a quarter is kept at most."""
    length = registry.context_length(registry.resolve(context.model))
    return max(1, length - max(1, min(context.sampling.max_tokens, length // 4)))


def _cut(token_ids: TokenIds, context: RequestContext, registry: Registry) -> TokenIds:
    """What is left of a prompt."""
    truncation = context.truncation
    if truncation is None:
        return token_ids
    most = truncation.tokens
    if most < 0:
        length, wanted = registry.context_length(registry.resolve(context.model)), context.sampling.max_tokens
        most = max(1, length - (wanted if wanted < length else 1))
    return token_ids[:most] if truncation.keep_first else token_ids[-most:]


async def _bad_words(context: RequestContext, tokenizer: TokenizerClient) -> tuple[tuple[int, ...], ...]:
    """The tokens of bad words, at the start of a word and within one, beside those that came as tokens."""
    words = [form for word in context.bad_words for form in (word, " " + word)]
    encoded = await tokenizer.encode_texts(
        words, context.request_id, context.deadline, context.caller.cache_salt, bare=True
    )
    longest = max(map(len, encoded))
    if longest > LONGEST_BAD_WORD:
        word = words[next(index for index, ids in enumerate(encoded) if len(ids) == longest)].strip()
        raise InvalidArgumentError(
            f"{word[:20]!r} has {longest} tokens; a bad word may have {LONGEST_BAD_WORD}", field="bad_words"
        )
    return tuple(dict.fromkeys((*context.sampling.bad_words_ids, *(tuple(ids) for ids in encoded if ids))))


async def _prepare_gap(
    context: RequestContext, prompt: TextPrompt, tokenizer: TokenizerClient, registry: Registry, stint: Stint
) -> None:
    encoded = await tokenizer.encode_gap(
        prompt,
        context.request_id,
        context.deadline,
        context.caller.cache_salt,
        stint,
        most_tokens=_most_tokens(context, registry),
    )
    context.token_ids = encoded.token_ids
    if not context.sampling.ignore_eos:
        context.own_ends = frozenset(encoded.end_token_ids).difference(context.sampling.stop_token_ids)
        ends = dict.fromkeys((*context.sampling.stop_token_ids, *encoded.end_token_ids))
        context.sampling = replace(context.sampling, stop_token_ids=tuple(ends))


async def _prepare_chat(
    context: RequestContext, prompt: ChatPrompt, tokenizer: TokenizerClient, registry: Registry, stint: Stint
) -> None:
    info = await tokenizer.info(context.request_id, context.deadline)
    choice = context.tool_choice
    drops_turns = context.truncation is not None and context.truncation.drops_turns
    most_tokens = _most_tokens(context, registry)

    async def encode(shown: ChatPrompt) -> EncodedChat:
        return await tokenizer.encode_chat(
            shown, context.request_id, context.deadline, context.caller.cache_salt, stint, most_tokens=most_tokens
        )

    if drops_turns:
        encoded = await shortened(prompt, encode, _room(context, registry))
        context.token_ids = encoded.token_ids
    else:
        encoded = await encode(prompt)
        context.token_ids = _cut(encoded.token_ids, context, registry)
    if encoded.pictures and len(context.token_ids) < len(encoded.token_ids):
        raise InvalidArgumentError("a conversation with pictures is not cut between its tokens", field="messages")
    context.pictures = encoded.pictures
    context.output = replace(
        context.output,
        tool_parser=info.tool_parser if prompt.tools else "",
        reasoning_parser=info.reasoning_parser,
        reasoning_open=encoded.reasoning_open,
        tools=prompt.tools,
        # Clients may use a request id twice, even in one conversation, in which each call's id must be its own.
        call_id_seed=context.worker_request_id,
    )
    if prompt.tools and info.hides_tools:
        context.notice = TOOLS_HIDDEN
    # Where no parser finds calls that are the model's own choice, they are text like any other.
    strict = bool(info.tool_parser) and has_strict_tool(prompt.tools)
    constrained = bool(prompt.tools) and (choice.required or strict)
    if constrained or context.grammar is not None:
        await _compile(context, tokenizer)


async def _compile(context: RequestContext, tokenizer: TokenizerClient) -> None:
    request = to_compile_request(context)
    grammar = await tokenizer.compile_grammar(request, context.request_id, context.deadline)
    context.compiled_grammar = grammar.compiled
    if grammar.left_out and not context.notice:
        context.notice = f"not enforced: {header_text('; '.join(grammar.left_out))}"
    if grammar.tool_parser:
        context.output = replace(context.output, tool_parser=grammar.tool_parser)


def header_text(text: str) -> str:
    """A text as the value of a header: printable ASCII, not long."""
    return "".join(letter if " " <= letter <= "~" else "?" for letter in text[:_LONGEST_NOTICE])


_USUAL_TOKENS = 256
"""Tokens that a request without max_tokens is assumed to generate, when its share is counted."""
_MOST_TOKENS = 4096
"""No request is assumed to need more: clients set a huge max_tokens to mean "no limit", and mostly get no more than others."""
CHARACTERS_A_TOKEN = 4
"""A rough mean, for text that is not tokenized yet."""


def settle_model(context: RequestContext, registry: Registry) -> None:
    """Tells model and adapter of a request apart. May be called again; leaves a model that is not known to later stages.

    Raises:
        NotFoundError: The model has no such adapter.
        InvalidArgumentError: Two adapters are named, or several models have the one that is.
    """
    if context.named:
        return
    lora = registry.lora_of(context.model)
    if lora:
        if context.lora not in ("", lora):
            raise InvalidArgumentError(f"model names the adapter {lora!r}, lora_name another", field="lora_name")
        context.lora, context.named = lora, context.model or lora
        context.model = registry.resolve(context.model)
    elif context.lora:
        model = registry.resolve(context.model)
        registry.check_lora(model, context.lora, context.fields.lora)
        context.model, context.named = model, context.lora


def cost_of(context: RequestContext) -> int:
    """What the request counts against its tenant's share, in tokens: prompt and answer, both estimated."""
    prompt, tokens = context.prompt, context.sampling.max_tokens
    tokens = _USUAL_TOKENS if tokens == AS_MANY_AS_FIT else min(tokens, _MOST_TOKENS)
    if isinstance(prompt, TextPrompt):
        return tokens + len(prompt.text) // CHARACTERS_A_TOKEN
    if isinstance(prompt, ChatPrompt):
        return tokens + sum(len(turn.content or "") for turn in prompt.turns) // CHARACTERS_A_TOKEN
    return tokens + len(prompt.token_ids)


async def shortened(
    prompt: ChatPrompt, encode: Callable[[ChatPrompt], Awaitable[EncodedChat]], most: int
) -> EncodedChat:
    """The tokens of a conversation, or of what is left of it.

    What the system says at the start stays, and so do the user's last turn and all of the last answer's call. A call goes
    together with its results. O(log(turns)) conversations are encoded.

    Args:
        prompt: The conversation.
        encode: Encodes one.
        most: Tokens that it may have.

    Raises:
        PromptTooLongError: What must stay is longer.
        SapwoodError: As ``encode``.
    """

    async def fit(turns: tuple[Turn, ...]) -> EncodedChat | PromptTooLongError:
        try:
            encoded = await encode(replace(prompt, turns=turns))
        except PromptTooLongError as error:
            return error
        tokens = len(encoded.token_ids)
        return encoded if tokens <= most else PromptTooLongError.of(tokens, most, field="messages")

    best = await fit(prompt.turns)
    if isinstance(best, EncodedChat):
        return best
    cuts = _cuts(prompt.turns)
    least, beyond = 0, len(cuts)
    while least < beyond:  # the first cut that fits
        middle = (least + beyond) // 2
        found = await fit(cuts[middle]())
        if isinstance(found, EncodedChat):
            best, beyond = found, middle
        else:
            least = middle + 1
            best = found if isinstance(best, PromptTooLongError) else best
    if isinstance(best, PromptTooLongError):
        raise best
    return best


def _cuts(turns: Sequence[Turn]) -> list[Callable[[], tuple[Turn, ...]]]:
    """Makes what is left of a conversation: each of these leaves out more than the one before.

    First go the user's turns before the last one, each with all that was answered to it; then what the assistant did since the
    last one.
    """
    start = next((index for index, turn in enumerate(turns) if turn.role != "system"), len(turns))
    asked = [index for index in range(start, len(turns)) if turns[index].role == "user"]
    cuts: list[Callable[[], tuple[Turn, ...]]] = []

    def leave(keeps: int, goes_on: int) -> None:
        cuts.append(lambda: (*turns[:start], *turns[keeps : keeps + 1], *turns[goes_on:]))

    for index in asked:
        if index > start:
            leave(index, index + 1)
    last = asked[-1] if asked else start - 1
    for index in range(last + 2, len(turns)):
        if turns[index].role != "tool":
            leave(last, index) if asked else leave(index, index + 1)
    return cuts
