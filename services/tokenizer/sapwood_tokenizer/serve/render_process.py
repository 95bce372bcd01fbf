"""The process that renders chat templates: ``python -P -m sapwood_tokenizer.serve.render_process``, of a ``ChildPool``.

The settings are a JSON object: ``template``, ``special_tokens``, ``origin``. The greeting is a JSON object: ``shows_tools`` and
``variables``, or ``error`` where the template cannot be compiled.

A question is a byte of flags and a serialised ApplyChatTemplateRequest; with ``PROBE`` it asks for the template's form instead.
An answer is ``+`` and the text (or, of a probe, flags), or ``-`` and a JSON list: message and field of the error.
"""

from __future__ import annotations

import json
import sys

from sapwood.v1 import tokenizer_pb2
from sapwood_common.child_pool import Answer, serve_parent
from sapwood_common.errors import ConfigError, InvalidArgumentError
from sapwood_text.tool_parser.tools import load_tools
from sapwood_tokenizer.serve.chat_messages import to_messages, to_variables
from sapwood_tokenizer.template.chat_template import ChatTemplate, Form

PROMPTED, LATE_SYSTEM, PARTS, PROBE = 1, 2, 4, 128


def make(settings: bytes) -> tuple[bytes, Answer]:
    """Compiles the template."""
    given = json.loads(settings)
    try:
        template = ChatTemplate(given["template"], given["special_tokens"], given["origin"])
    except ConfigError as error:
        return json.dumps({"error": str(error)}).encode(), lambda question: b"-[]"
    greeting = {"shows_tools": template.shows_tools, "variables": template.variables}
    return json.dumps(greeting).encode(), lambda question: _answer(template, question)


def _answer(template: ChatTemplate, question: bytes) -> bytes:
    flags = question[0]
    if flags & PROBE:
        form = template.probe()
        return b"+" + bytes([form.late_system * LATE_SYSTEM | form.parts * PARTS])
    request = tokenizer_pb2.ApplyChatTemplateRequest.FromString(question[1:])
    try:
        text = template.render(
            to_messages(request.messages),
            add_generation_prompt=bool(flags & PROMPTED),
            tools=load_tools(request.tools),
            continue_final_message=request.continue_final_message,
            variables=to_variables(request.template_variables),
            form=Form(bool(flags & LATE_SYSTEM), bool(flags & PARTS)),
        )
    except InvalidArgumentError as error:
        return b"-" + json.dumps([error.message, error.field]).encode()
    return b"+" + text.encode()


if __name__ == "__main__":
    sys.exit(serve_parent(make))
