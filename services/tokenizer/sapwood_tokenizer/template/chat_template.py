"""Renders a conversation with the model's Jinja template, in a sandbox, as Hugging Face's transformers does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.parser import Parser

from sapwood_common.errors import ConfigError, InvalidArgumentError


class NoContent:
    """The content of a message that has none: templates see none in it, and it is written as nothing, not as ``None``.

    Templates that look into content find it empty.
    """

    def __str__(self) -> str:
        return ""

    def __repr__(self) -> str:
        return "None"  # inside of what is written as Python would

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, NoContent)

    def __hash__(self) -> int:
        return hash(None)

    def __len__(self) -> int:
        return 0

    def __contains__(self, item: object) -> bool:
        return False

    def __add__(self, other: object) -> object:
        return other

    def __radd__(self, other: object) -> object:
        return other


class GenerationTag(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}``, with which some templates mark what the assistant says for training.

    What is inside is rendered as if the marks were not there.
    """

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Generator(CodeGenerator):
    """Writes what is constant in a template to be computed when it renders."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: CodeGenerator._FinalizeInfo) -> str:
        if not isinstance(node, nodes.TemplateData | nodes.Const):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class _Tracker(_Generator, jinja2.meta.TrackingCodeGenerator):
    """Finds the variables that a template reads and does not set, and computes nothing either."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.optimizer = None


class TemplateSandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with the settings that chat templates are written for."""

    code_generator_class = _Generator

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[jinja2.ext.loopcontrols, GenerationTag],
        )
        self.tests["none"] = _is_none

    def variables_of(self, template: nodes.Template) -> set[str]:
        """The variables that a template reads before it sets them, or asks whether they are defined."""
        tracker = _Tracker(self)
        tracker.visit(template)
        asked = {
            test.node.name
            for test in template.find_all(nodes.Test)
            if test.name in ("defined", "undefined") and isinstance(test.node, nodes.Name)
        }
        return tracker.undeclared_identifiers | asked


def _is_none(value: Any) -> bool:
    return value is None or isinstance(value, NoContent)


MOST_CHARACTERS = 16 * 1024 * 1024
"""Characters of the longest text that a rendering may make."""
_LONGEST_MESSAGE = 400
_GIVEN = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables that every template is given."""
_CONTINUE_HERE = "\ue0a0continue here\ue0a0"
"""Marks the end of the message to continue; private-use characters, which nobody writes."""
_BETWEEN_SYSTEMS = "\n\n"
"""The separator of system messages that are joined."""
BETWEEN_PARTS = "\n"
"""What stands between texts of a message that become one, as in vLLM and SGLang."""
_MOST_VARIABLES = 64


@dataclass(frozen=True, slots=True)
class Form:
    """The form in which a template takes conversations.

    Attributes:
        late_system: Whether it shows system messages that are not the first message. Else they are joined to the first.
        parts: Whether it takes content of several texts as a list. Else they are joined.
    """

    late_system: bool = True
    parts: bool = False


AS_GIVEN = Form()


class ChatTemplate:
    """A compiled template. Thread-safe: rendering changes nothing.

    Args:
        source: Jinja source.
        special_tokens: ``bos_token`` and the like, for the template's use.
        origin: Where the source is from, for the error.

    Raises:
        ConfigError: The source is not a Jinja template; the message has the origin and the line.

    Attributes:
        shows_tools: Whether the template reads ``tools``.
        variables: What callers may set in it to an effect.
    """

    def __init__(self, source: str, special_tokens: dict[str, str], origin: str = "the model") -> None:
        environment = TemplateSandbox()
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        try:
            parsed = environment.parse(source)
            self.shows_tools = any(name.name == "tools" for name in parsed.find_all(jinja2.nodes.Name))
            names = environment.variables_of(parsed)
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"{origin}: the chat template is wrong at line {error.lineno}: {error.message}"
            ) from error
        except (RecursionError, SyntaxError, MemoryError) as error:  # Jinja's own parser lets these through
            said = str(error) or "it is too large"
            raise ConfigError(f"{origin}: the chat template cannot be compiled: {said}") from error
        self.variables = sorted(names.difference(_GIVEN, special_tokens))[:_MOST_VARIABLES]
        self._special_tokens = special_tokens

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[dict[str, Any]] = (),
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        form: Form = AS_GIVEN,
    ) -> str:
        """The conversation as one text.

        Args:
            messages: In the form of OpenAI's API; not changed. Content may be a list of texts.
            add_generation_prompt: Whether the text ends with the opening of the assistant's turn.
            tools: The tools on offer, in the form of OpenAI's API.
            continue_final_message: Whether the text ends where the last message's content does, so that the model continues
                there.
            variables: Further variables for the template; they may replace special tokens, but no other given variable.
            form: What :meth:`probe` found.

        Raises:
            InvalidArgumentError: A variable has the name of a given one; the template refuses the messages, or its text grows too
                long; or the last message is to be continued and has no content, or the template does not show it.
        """
        given = {**self._special_tokens, **(variables or {})}
        taken = next((name for name in _GIVEN if name in given), None)
        if taken is not None:
            raise InvalidArgumentError(f"{taken} is no variable of the caller's", field="template_variables")
        given |= {"tools": list(tools) or None, "documents": None, "add_generation_prompt": add_generation_prompt}
        messages = _in_form(messages, form, continued=continue_final_message)
        if not continue_final_message:
            return self._render({**given, "messages": messages})
        last = messages[-1]
        if not isinstance(last.get("content"), str):
            raise InvalidArgumentError(
                "the last message has no content to continue with", field="continue_final_message"
            )
        marked = {**last, "content": last["content"] + _CONTINUE_HERE + " "}
        text = self._render({**given, "messages": [*messages[:-1], marked]})
        before, mark, after = text.rpartition(_CONTINUE_HERE)
        if not mark:
            raise InvalidArgumentError(
                "the chat template does not show the last message's content", field="continue_final_message"
            )
        # A template that keeps the space after the mark also keeps the content's trailing space; one that trims it trims both.
        return before if after.startswith(" ") else before.rstrip()

    def probe(self) -> Form:
        """Finds out, by rendering small conversations, in which form the template takes them."""
        user, reply = {"role": "user", "content": "(user)"}, {"role": "assistant", "content": "(reply)"}
        first, late = {"role": "system", "content": "(first)"}, {"role": "system", "content": "(late)"}
        late_system = all(
            self._shows(conversation)
            for conversation in (
                [first, user, late],
                [user, late],
                [user, reply, late, user],
                [first, late, user],
                [first, user, reply, late, user],
            )
        )
        texts = ["(one)", "(other)"]
        shown = self._probed([{"role": "user", "content": _parts_of(texts)}])
        parts = all(text in shown for text in texts) and "'type'" not in shown and '"type"' not in shown
        return Form(late_system, parts)

    def _shows(self, conversation: list[dict[str, Any]]) -> bool:
        shown = self._probed(conversation)
        return all(message["content"] in shown for message in conversation)

    def _probed(self, conversation: list[dict[str, Any]]) -> str:
        try:
            return self.render(conversation, add_generation_prompt=True)
        except InvalidArgumentError:
            return ""

    def _written(self, variables: Mapping[str, Any]) -> str:
        """The text that the template makes of them. Some look into content that is not there: such get empty content."""
        try:
            return self._generated(variables)
        except (TypeError, AttributeError, jinja2.UndefinedError):
            filled = _with_content(variables["messages"])
            if filled is None:
                raise
            return self._generated({**variables, "messages": filled})

    def _generated(self, variables: Mapping[str, Any]) -> str:
        parts: list[str] = []
        left = MOST_CHARACTERS
        for part in self._template.generate(variables):
            left -= len(part)
            if left < 0:
                raise _TooLongError
            parts.append(part)
        return "".join(parts)

    def _render(self, variables: Mapping[str, Any]) -> str:
        try:
            text = self._written(variables)
        except (_TooLongError, MemoryError) as error:
            reason = "the text grows too long" if isinstance(error, _TooLongError) else "it needs too much memory"
            raise InvalidArgumentError(f"the chat template was stopped: {reason}", field="messages") from None
        except Exception as error:  # a template is a program: what it trips over may be of any class
            raise InvalidArgumentError(
                f"the chat template refuses the messages: {_shortened(error)}", field="messages"
            ) from error
        try:
            text.encode()
        except UnicodeEncodeError as error:  # of JSON, in which clients write arguments and tools
            raise InvalidArgumentError(
                "the conversation holds half a surrogate pair, which is no text", field="messages"
            ) from error
        return text


class _TooLongError(Exception):
    """The rendered text grows too long."""


def _in_form(messages: Sequence[dict[str, Any]], form: Form, *, continued: bool) -> list[dict[str, Any]]:
    """The messages as the template takes them."""
    made = []
    last = len(messages) - 1
    for index, message in enumerate(messages):
        content = message.get("content", NoContent)
        if content is None:
            message = {**message, "content": NoContent()}
        elif isinstance(content, list | tuple) and content and isinstance(content[0], str):
            taken = form.parts and not (continued and index == last)
            message = {**message, "content": _parts_of(content) if taken else BETWEEN_PARTS.join(content)}
        made.append(message)
    if form.late_system or all(message["role"] != "system" for message in made[1:]):
        return made
    return _with_one_system(made)


def _with_one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with what all system messages say in one, which is the first."""
    systems = [message for message in messages if message["role"] == "system"]
    said = [_text_of(message["content"]) for message in systems]
    one = {**systems[0], "content": _BETWEEN_SYSTEMS.join(text for text in said if text)}
    return [one, *(message for message in messages if message["role"] != "system")]


def _text_of(content: Any) -> str:
    if isinstance(content, list):
        return BETWEEN_PARTS.join(part["text"] for part in content)
    return str(content)


def _parts_of(texts: Sequence[str]) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _with_content(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """The messages with "" for content that is None; None if there is none such."""
    if all("content" in message and not isinstance(message["content"], NoContent) for message in messages):
        return None
    return [{**message, "content": message.get("content") or ""} for message in messages]


def _shortened(error: Exception) -> str:
    # Templates put clients' messages into their errors.
    message = (str(error) or type(error).__name__).encode(errors="replace").decode()
    return message if len(message) <= _LONGEST_MESSAGE else message[:_LONGEST_MESSAGE] + "..."


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters; models were not trained on that.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_plain,
    )


def _plain(value: Any) -> None:
    """JSON's value for one that it does not know."""
    if isinstance(value, NoContent):
        return
    raise TypeError(f"{type(value).__name__} is no JSON value")


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
