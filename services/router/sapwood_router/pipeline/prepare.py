"""Stage 1: the prompt becomes token ids, and it is settled how the output will be parsed."""

from __future__ import annotations

from dataclasses import replace

from sapwood_common.errors import InvalidArgumentError, SapwoodError
from sapwood_router.context import ChatPrompt, RequestContext, TextPrompt
from sapwood_router.field_names import to_client_field
from sapwood_router.tokenizer_client import TokenizerClient
from sapwood_router.validation import check_prompt, check_sampling, check_stop


async def prepare(context: RequestContext, tokenizer: TokenizerClient) -> None:
    """Checks the request and fills ``token_ids`` and, for a conversation, the parsers in ``output``.

    Raises:
        InvalidArgumentError: A field is malformed or out of range, or tools are given that the model cannot call.
        SapwoodError: As the tokenizer service answers.
    """
    check_prompt(context.prompt, context.fields)
    check_sampling(context.sampling, context.fields)
    check_stop(context.output.stop)
    prompt = context.prompt
    try:
        if isinstance(prompt, TextPrompt):
            context.token_ids = await tokenizer.encode_text(prompt.text, context.request_id, context.deadline)
        elif isinstance(prompt, ChatPrompt):
            await _prepare_chat(context, prompt, tokenizer)
        else:
            context.token_ids = prompt.token_ids
    except SapwoodError as error:
        raise to_client_field(error, context.fields) from error


async def _prepare_chat(context: RequestContext, prompt: ChatPrompt, tokenizer: TokenizerClient) -> None:
    parsers = await tokenizer.parsers(context.request_id, context.deadline)
    if prompt.tools and not parsers.tool_parser:
        raise InvalidArgumentError(
            "tools are not supported with this model: the tokenizer service has no parser for its calls (see --tool-parser)",
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
