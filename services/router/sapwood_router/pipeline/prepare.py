"""Stage 1: the prompt becomes token ids, and it is settled what the output must match and how it will be parsed."""

from __future__ import annotations

from msgspec.structs import replace

from sapwood_common.errors import InvalidArgumentError, SapwoodError
from sapwood_common.flags import service_flag
from sapwood_router.context import ChatPrompt, RequestContext, TextPrompt
from sapwood_router.convert import to_compile_request
from sapwood_router.field_names import to_client_field
from sapwood_router.structure import has_strict_tool
from sapwood_router.tokenizer_client import TokenizerClient
from sapwood_router.validation import check_prompt, check_stop, check_tokens_only


async def prepare(context: RequestContext, tokenizer: TokenizerClient) -> None:
    """Checks the request and fills ``token_ids``, ``compiled_grammar`` and, for a conversation, the parsers in ``output``.

    Raises:
        InvalidArgumentError: A field is malformed or out of range, or tools are given that the model cannot call.
        SapwoodError: As the tokenizer service answers.
    """
    check_prompt(context.prompt, context.fields)
    check_stop(context.output.stop)
    if not context.detokenize:
        check_tokens_only(context.prompt, context.output.stop)
    prompt = context.prompt
    try:
        if isinstance(prompt, TextPrompt):
            context.token_ids = await tokenizer.encode_text(prompt.text, context.request_id, context.deadline)
        elif isinstance(prompt, ChatPrompt):
            await _prepare_chat(context, prompt, tokenizer)
        else:
            context.token_ids = prompt.token_ids
        if context.grammar is not None and not isinstance(prompt, ChatPrompt):
            await _compile(context, tokenizer)
    except SapwoodError as error:
        raise to_client_field(error, context.fields) from error


async def _prepare_chat(context: RequestContext, prompt: ChatPrompt, tokenizer: TokenizerClient) -> None:
    parsers = await tokenizer.parsers(context.request_id, context.deadline)
    choice = context.tool_choice
    if prompt.tools and not parsers.tool_parser and not choice.required:
        raise InvalidArgumentError(
            "tools are not supported with this model unless a call is required: the tokenizer service has no parser for its"
            f" calls, and none is named by {service_flag('tokenizer', 'tool-parser')}",
            field="tools",
        )
    encoded = await tokenizer.encode_chat(prompt, context.request_id, context.deadline)
    context.token_ids = encoded.token_ids
    context.output = replace(
        context.output,
        tool_parser=parsers.tool_parser if prompt.tools else "",
        reasoning_parser=parsers.reasoning_parser,
        reasoning_open=encoded.reasoning_open,
        tools=prompt.tools,
        # Clients may use a request id twice, even in one conversation, in which each call's id must be its own.
        call_id_seed=context.worker_request_id,
    )
    constrained = bool(prompt.tools) and (choice.required or has_strict_tool(prompt.tools))
    if constrained or context.grammar is not None:
        await _compile(context, tokenizer)


async def _compile(context: RequestContext, tokenizer: TokenizerClient) -> None:
    request = to_compile_request(context)
    grammar = await tokenizer.compile_grammar(request, context.request_id, context.deadline)
    context.compiled_grammar = grammar.compiled
    if grammar.tool_parser:
        context.output = replace(context.output, tool_parser=grammar.tool_parser)
