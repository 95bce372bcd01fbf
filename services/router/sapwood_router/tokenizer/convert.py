"""What the tokenizer service is asked, as messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sapwood.v1 import common_pb2, tokenizer_pb2
from sapwood_router.request.arguments import whole_arguments
from sapwood_router.request.context import AnswerGrammar, ChatPrompt, RequestContext, Turn


def to_grammar(grammar: AnswerGrammar) -> common_pb2.Grammar:
    """A grammar as a message."""
    options = common_pb2.GrammarOptions(any_whitespace=grammar.any_whitespace, lenient=grammar.lenient)
    kind: dict[str, Any] = {grammar.kind: grammar.text}
    return common_pb2.Grammar(options=options, **kind)


def to_compile_request(context: RequestContext) -> tokenizer_pb2.CompileGrammarRequest:
    """What the tokenizer service is asked to compile for a request whose prompt and parsers are known."""
    prompt, choice, output = context.prompt, context.tool_choice, context.output
    request = tokenizer_pb2.CompileGrammarRequest(
        reasoning_parser=output.reasoning_parser, cache_salt=context.caller.cache_salt
    )
    if output.reasoning_open is not None:
        request.reasoning_open = output.reasoning_open
    if context.grammar is not None:
        request.grammar.CopyFrom(to_grammar(context.grammar))
    if isinstance(prompt, ChatPrompt) and prompt.tools and (choice.required or output.tool_parser):
        request.tool_calls.tools = prompt.tools
        request.tool_calls.name = choice.name
        request.tool_calls.required = choice.required
        request.tool_calls.parallel = context.parallel_tool_calls and not choice.name
        request.tool_calls.tool_parser = output.tool_parser
    return request


def to_turns(turns: Sequence[Turn]) -> list[common_pb2.ChatMessage]:
    """A conversation as messages."""
    return [
        common_pb2.ChatMessage(
            role=turn.role,
            content=turn.content,
            name=turn.name,
            tool_calls=[
                common_pb2.ToolCall(id=call.id, name=call.name, arguments=whole_arguments(call.arguments))
                for call in turn.tool_calls
            ],
            tool_call_id=turn.tool_call_id,
            reasoning=turn.reasoning,
            parts=turn.parts,
        )
        for turn in turns
    ]
