"""Renders a conversation with the model's Jinja template, in a sandbox, as Hugging Face's transformers does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.nodes

from sapwood_common.errors import ConfigError, InvalidArgumentError, ResourceExhaustedError
from sapwood_tokenizer.template.sandbox import BUDGET, Budget, BudgetError, TemplateSandbox

MOST_CHARACTERS = 16 * 1024 * 1024
"""Characters of the longest text that a rendering may make."""
_DEFAULT_SECONDS = 10.0
_LONGEST_MESSAGE = 400
_GIVEN = ("messages", "tools", "documents", "add_generation_prompt", BUDGET)
"""Variables that every template is given."""
_CONTINUE_HERE = "\ue0a0continue here\ue0a0"
"""Marks the end of the message to continue; private-use characters, which nobody writes."""


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
    """

    def __init__(self, source: str, special_tokens: dict[str, str], origin: str = "the model") -> None:
        environment = TemplateSandbox()
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        try:
            names = environment.parse(source).find_all(jinja2.nodes.Name)
            self.shows_tools = any(name.name == "tools" for name in names)
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"{origin}: the chat template is wrong at line {error.lineno}: {error.message}"
            ) from error
        except (RecursionError, SyntaxError) as error:  # Jinja's own parser lets these through
            raise ConfigError(f"{origin}: the chat template cannot be compiled: {error}") from error
        self._special_tokens = special_tokens

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[dict[str, Any]] = (),
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        budget: Budget | None = None,
    ) -> str:
        """The conversation as one text.

        Args:
            messages: In the form of OpenAI's API; not changed.
            add_generation_prompt: Whether the text ends with the opening of the assistant's turn.
            tools: The tools on offer, in the form of OpenAI's API.
            continue_final_message: Whether the text ends where the last message's content does, so that the model goes on there.
            variables: Further variables for the template; they may replace special tokens, but no other given variable.
            budget: Bounds on the rendering, not yet started; ten seconds unless given.

        Raises:
            InvalidArgumentError: A variable has the name of a given one; the template refuses the messages, or it exceeds its
                budget; or the last message is to be continued and has no content, or the template does not show it.
            ResourceExhaustedError: The rendering is slow, and too many slow ones run already.
        """
        budget = budget or Budget(_DEFAULT_SECONDS, MOST_CHARACTERS)
        given = {**self._special_tokens, **(variables or {})}
        taken = next((name for name in _GIVEN if name in given), None)
        if taken is not None:
            raise InvalidArgumentError(f"{taken} is no variable of the caller's", field="template_variables")
        given |= {"tools": list(tools) or None, "documents": None, "add_generation_prompt": add_generation_prompt}
        if not continue_final_message:
            return self._render({**given, "messages": messages}, budget)
        last = messages[-1]
        if not isinstance(last.get("content"), str):
            raise InvalidArgumentError("the last message has no content to go on with", field="continue_final_message")
        marked = {**last, "content": last["content"] + _CONTINUE_HERE + " "}
        text = self._render({**given, "messages": [*messages[:-1], marked]}, budget)
        before, mark, after = text.rpartition(_CONTINUE_HERE)
        if not mark:
            raise InvalidArgumentError(
                "the chat template does not show the last message's content", field="continue_final_message"
            )
        # A template that keeps the space after the mark also keeps the content's trailing space; one that trims it trims both.
        return before if after.startswith(" ") else before.rstrip()

    def _written(self, variables: Mapping[str, Any], budget: Budget) -> str:
        """What the template makes of them. Some look into content that is not there: such are told that it is empty."""
        try:
            return self._generated(variables, budget)
        except (TypeError, AttributeError, jinja2.UndefinedError):
            filled = _with_content(variables["messages"])
            if filled is None:
                raise
            return self._generated({**variables, "messages": filled}, budget)

    def _generated(self, variables: Mapping[str, Any], budget: Budget) -> str:
        parts: list[str] = []
        for part in self._template.generate({**variables, BUDGET: budget}):
            budget.add(len(part))
            parts.append(part)
        return "".join(parts)

    def _render(self, variables: Mapping[str, Any], budget: Budget) -> str:
        budget.start()
        try:
            text = self._written(variables, budget)
        except BudgetError as error:
            raise InvalidArgumentError(f"the chat template was stopped: {error}", field="messages") from error
        except ResourceExhaustedError:
            raise
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


def _with_content(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """The messages with "" for content that is None; None if there is none such."""
    if all(message.get("content") is not None for message in messages):
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
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
