"""The nodes of a program: what ``s += ...`` appends to a state, and the functions that make them.

A node is data: it says what to do and on which line of the user's program it stands. The interpreter does it.
"""

from __future__ import annotations

import json
import re
import sys
from asyncio import Future
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, SupportsIndex, TypedDict, Unpack

from sapwood.lang.choices import ChoicesMethod, token_length_normalized

INT_REGEX = r"[-+]?[0-9]+"
FLOAT_REGEX = r"[-+]?[0-9]*\.?[0-9]+"
BOOL_REGEX = r"(True|False)"
STRING_REGEX = r"\"[\w\d\s]*\""


class Sampling(TypedDict, total=False):
    """How a ``gen`` samples; what is left out is the run's option of that name, and then the server's default.

    Attributes:
        min_tokens: The answer does not end before this many tokens.
        n: So many answers to the same prompt; the variable is then a list, and the text goes on with the first.
        stop: The text ends before the first of these.
        stop_token_ids: It ends at any of these.
        stop_regex: It ends before the first match of any of these.
        temperature: 0 is greedy.
        top_p, top_k, min_p: Which tokens may be drawn. A ``top_k`` of -1 allows all.
        frequency_penalty, presence_penalty, repetition_penalty: Make repetitions less likely.
        logit_bias: Token id to what is added to its logit.
        seed: The same seed gives the same tokens.
        token_healing: Whether the last tokens before the answer are taken back where a longer token could begin with their text:
            for texts that end within a word or a mark, without a grammar.
        ignore_eos: Whether generation continues past the model's own end.
        return_logprob: Whether the node's metadata has ``output_token_logprobs``: for each token its log probability, its id and
            its text, each None where the backend does not say it.
        top_logprobs_num: How many likely tokens in place of each ``output_top_logprobs`` has, in the same form.
        logprob_start_len, return_text_in_logprobs: Of SGLang's API; backends that speak it take them.
        regex, json_schema, ebnf, structural_tag: What the text must match. A schema is a mapping, JSON text, or a class with
            ``model_json_schema`` (pydantic).
    """

    min_tokens: int
    n: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    stop_regex: str | Sequence[str]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    token_healing: bool
    ignore_eos: bool
    return_logprob: bool
    top_logprobs_num: int
    logprob_start_len: int
    return_text_in_logprobs: bool
    regex: str
    json_schema: Any
    ebnf: str
    structural_tag: Mapping[str, Any] | str


class GenOptions(Sampling, total=False):
    """The same, and ``max_tokens``: the most tokens to generate; 128 if neither the node nor the run says it."""

    max_tokens: int


OPTION_NAMES = frozenset({*Sampling.__annotations__, "max_tokens"})
GRAMMARS = ("regex", "json_schema", "ebnf", "structural_tag")


def where() -> str:
    """``file:line`` of the innermost call that is not of this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith("sapwood.lang"):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class Expression:
    """Anything that can be appended to a state; ``+`` makes lists of them, with texts among them."""

    def __add__(self, other: str | Expression) -> ExpressionList:
        return ExpressionList([*parts_of(self), *parts_of(other)])

    def __radd__(self, other: str | Expression) -> ExpressionList:
        return ExpressionList([*parts_of(other), *parts_of(self)])

    def __format__(self, spec: str) -> str:
        """Raises TypeError: a text would have the node's description, not what it does."""
        raise TypeError(f"an expression cannot stand in an f-string: append it with + ({where()})")


class ExpressionList(Expression):
    """Nodes that are done one after the other."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = tuple(nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)


@dataclass(eq=False, kw_only=True)
class Node(Expression):
    """One thing to do; ``line`` is where the program says so."""

    line: str = field(default_factory=where)

    @property
    def names(self) -> tuple[str, ...]:
        """The variables that it sets."""
        return ()


@dataclass(eq=False)
class Text(Node):
    """A constant text."""

    text: str

    def __str__(self) -> str:
        return f"text {self.text[:40]!r}"


@dataclass(eq=False)
class Gen(Node):
    """The model continues the text.

    Attributes:
        name: The variable that gets the answer; None: only the text does.
        options: How it samples.
        kind: What ``s.value(name)`` makes of the answer: a key of ``VALUES``; None: nothing.
    """

    name: str | None
    options: GenOptions
    kind: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,) if self.name is not None else ()

    def __str__(self) -> str:
        return f"gen({self.name!r})" if self.name else "gen()"


@dataclass(eq=False)
class Select(Node):
    """The likeliest of several continuations, by one of three methods."""

    name: str | None
    choices: tuple[str, ...]
    method: ChoicesMethod

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,) if self.name is not None else ()

    def __str__(self) -> str:
        return f"select({self.name!r}, {len(self.choices)} choices)"


@dataclass(eq=False)
class RoleBegin(Node):
    """A turn of this role begins."""

    role: str

    def __str__(self) -> str:
        return f"{self.role} begins"


@dataclass(eq=False)
class RoleEnd(Node):
    """The turn ends."""

    role: str

    def __str__(self) -> str:
        return f"{self.role} ends"


@dataclass(eq=False)
class Image(Node):
    """A picture: a path, a URL, or the bytes of a file."""

    source: str | bytes

    def __str__(self) -> str:
        return "image"


@dataclass(eq=False)
class Video(Node):
    """A video: a path, a URL, or the bytes of a file."""

    source: str | bytes

    def __str__(self) -> str:
        return "video"


@dataclass(eq=False)
class ScopeBegin(Node):
    """From here on the text belongs to a variable as well."""

    name: str

    def __str__(self) -> str:
        return f"scope {self.name!r} begins"


@dataclass(eq=False)
class ScopeEnd(Node):
    """The variable has its text."""

    name: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def __str__(self) -> str:
        return f"scope {self.name!r} ends"


@dataclass(eq=False)
class SetVariable(Node):
    """A variable gets a value that the program made."""

    name: str
    value: Any

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def __str__(self) -> str:
        return f"set {self.name!r}"


@dataclass(eq=False)
class Commit(Node):
    """The server computes the text so far, and keeps it cached while the program runs."""

    def __str__(self) -> str:
        return "commit"


@dataclass(eq=False)
class Fork(Node):
    """Other states, which are interpreters of their own, begin here."""

    children: tuple[Any, ...]

    def __str__(self) -> str:
        return f"fork({len(self.children)})"


@dataclass(eq=False)
class Join(Node):
    """Waits for forks, and takes their variables or their texts."""

    children: tuple[Any, ...]
    concatenate: bool

    def __str__(self) -> str:
        return f"join({len(self.children)})"


@dataclass(eq=False)
class Shared(Node):
    """A ``gen`` of several forks whose texts are equal: the first asks for all answers in one request.

    Attributes:
        gen: What each of them generates.
        index: Which of the answers is this fork's.
        size: How many forks there are.
        asked: The answers, a ``Generated``.
    """

    gen: Gen
    index: int
    size: int
    asked: Future[Any]

    @property
    def names(self) -> tuple[str, ...]:
        return self.gen.names

    def __str__(self) -> str:
        return str(self.gen)


@dataclass(eq=False)
class Reasoning(Node):
    """Sets the reasoning before an answer apart, as the variable ``<name>_reasoning_content``."""

    name: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, f"{self.name}_reasoning_content")

    def __str__(self) -> str:
        return f"separate_reasoning({self.name!r})"


def parts_of(given: str | Expression) -> list[Node]:
    """An expression's nodes. Raises TypeError for what is none."""
    if isinstance(given, str):
        return [Text(given)]
    if isinstance(given, ExpressionList):
        return list(given.nodes)
    if isinstance(given, Node):
        return [given]
    raise TypeError(f"{given!r:.60} is neither a text nor an expression of sapwood.lang ({where()})")


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    *,
    dtype: type | str | None = None,
    choices: Sequence[str] | None = None,
    choices_method: ChoicesMethod | None = None,
    **options: Unpack[Sampling],
) -> Expression:
    """The model continues the text.

    Args:
        name: The variable that gets the answer.
        max_tokens: The most tokens to generate.
        dtype: ``int``, ``float``, ``str`` or ``bool``: the answer is one; ``s.value(name)`` is of that type.
        choices: The answer is the likeliest of these: :func:`select`.
        choices_method: How it is chosen.
        options: The fields of :class:`Sampling`. None is as if it was not there.

    Raises:
        ValueError: There is no such option, a ``regex`` is none, or what the answer may be is said twice.
    """
    given: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
    if choices is not None:
        other = ["dtype"] if dtype is not None else [key for key in (*GRAMMARS, "n") if key in given]
        if other:
            raise ValueError(f"give only one of choices and {other[0]}")
        check_options(given)
        method = choices_method or token_length_normalized
        return select(name, choices, given.get("temperature", 0.0), choices_method=method)
    if choices_method is not None:
        raise ValueError("choices_method says how one of choices is chosen: there are no choices")
    _check_name("gen", name)
    if not isinstance(max_tokens, SupportsIndex | Expression | None):
        raise ValueError(f"max_tokens is a whole number, not {max_tokens!r:.60}")
    if max_tokens is not None:
        given["max_tokens"] = max_tokens
    found = "json" if "json_schema" in given else None
    if dtype is not None:
        found = getattr(dtype, "__name__", str(dtype))
        if found not in _TYPES:
            raise ValueError(f"dtype is one of {', '.join(_TYPES)}, not {found!r}")
        if "regex" in given:
            raise ValueError("give only one of dtype and regex")
        given["regex"], stops = _TYPES[found]
        if stops:
            stop = given.get("stop", ())
            given["stop"] = [*([stop] if isinstance(stop, str) else stop), *stops]
    check_options(given)
    return Gen(name, given, found)  # type: ignore[arg-type]


_TYPES: dict[str, tuple[str, tuple[str, ...]]] = {
    "int": (INT_REGEX + r"[ \n]*", (" ", "\n")),
    "float": (FLOAT_REGEX + r"[ \n]*", (" ", "\n")),
    "str": (STRING_REGEX, ()),
    "bool": (BOOL_REGEX, ()),
}
VALUES: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "str": lambda text: json.loads(text, strict=False),  # it may have line breaks
    "bool": lambda text: text == "True",
    "json": json.loads,
}
"""What an answer of each kind says; raises ValueError if it is cut off."""


def _check_name(what: str, name: Any) -> None:
    if not isinstance(name, str | Expression | None):
        raise ValueError(f"the name of a {what} is a text, not {name!r:.60}")


def check_options(given: Mapping[str, Any]) -> None:
    """Raises ValueError that names the option, if one is unknown, a regex is none or several grammars are given."""
    unknown = next((name for name in given if name not in OPTION_NAMES), None)
    if unknown is not None:
        raise ValueError(f"there is no option {unknown!r} of gen")
    grammars = [name for name in GRAMMARS if name in given]
    if len(grammars) > 1:
        raise ValueError(f"give only one of {' and '.join(grammars)}")
    patterns = given.get("stop_regex", ())
    for name, pattern in (
        ("regex", given.get("regex", "")),
        *(("stop_regex", each) for each in ([patterns] if isinstance(patterns, str) else patterns)),
    ):
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{name}: {pattern!r} is no regular expression: {error}") from None


def gen_int(name: str | None = None, max_tokens: int | None = None, **options: Unpack[Sampling]) -> Expression:
    """An integer; the text is its digits, ``s.value(name)`` the number."""
    return gen(name, max_tokens, dtype=int, **options)


def gen_float(name: str | None = None, max_tokens: int | None = None, **options: Unpack[Sampling]) -> Expression:
    """A decimal number."""
    return gen(name, max_tokens, dtype=float, **options)


def gen_string(name: str | None = None, max_tokens: int | None = None, **options: Unpack[Sampling]) -> Expression:
    """A text of letters, digits and spaces in double quotes."""
    return gen(name, max_tokens, dtype=str, **options)


def select(
    name: str | None = None,
    choices: Sequence[str] | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesMethod = token_length_normalized,
) -> Expression:
    """The likeliest of several continuations.

    Args:
        name: The variable that gets it; the node's metadata have the log probabilities.
        choices: The continuations; at least one, none empty.
        temperature: 0: choosing is never random.
        choices_method: One of :mod:`sapwood.lang.choices`. Of equally likely ones the first is chosen.

    Raises:
        ValueError: A choice is missing or empty, the temperature is not 0, or there is no such method.
    """
    _check_name("select", name)
    if not choices or isinstance(choices, str) or not all(isinstance(each, str) and each for each in choices):
        raise ValueError("select needs a list of choices, each a text that is not empty")
    if temperature > 1e-5:
        raise ValueError("select takes the likeliest choice: its temperature is 0")
    if not isinstance(choices_method, ChoicesMethod):
        raise ValueError(f"choices_method is one of sapwood.lang.choices, not {choices_method!r:.60}")
    return Select(name, tuple(choices), choices_method)


def image(source: str | bytes) -> Expression:
    """A picture, in a user's turn: a path, a URL, or the bytes of a file."""
    return Image(source)


def video(path: str | bytes, num_frames: int | None = None) -> Expression:
    """A video, in a user's turn: a path, a URL, or the bytes of a file.

    Args:
        path: The video.
        num_frames: Only None is served: the server takes as many frames as the model's rate asks for.

    Raises:
        ValueError: A number of frames is given.
    """
    if num_frames is not None:
        raise ValueError("num_frames: the server takes as many frames as the model's rate asks for; leave it out")
    return Video(path)


def commit() -> Expression:
    """The server computes the text so far and keeps it cached while the program runs."""
    return Commit()


def separate_reasoning(expr: str | Expression, model_type: str | None = None) -> Expression:
    """Sets the reasoning apart that comes before each named answer in ``expr``: it is ``s["<name>_reasoning_content"]``.

    Args:
        expr: Has a ``gen`` with a name.
        model_type: Taken for the sake of SGLang's programs; the server knows how its model marks reasoning.
    """
    nodes = parts_of(expr)
    named = [node.name for node in nodes if isinstance(node, Gen) and node.name is not None]
    if not named:
        raise ValueError("separate_reasoning needs a gen with a name")
    return ExpressionList([*nodes, *map(Reasoning, named)])


def _role(role: str, expr: str | Expression | None) -> ExpressionList:
    return ExpressionList([RoleBegin(role), *(parts_of(expr) if expr is not None else ()), RoleEnd(role)])


def system(expr: str | Expression | None = None) -> Expression:
    """A turn of the system."""
    return _role("system", expr)


def user(expr: str | Expression | None = None) -> Expression:
    """A turn of the user."""
    return _role("user", expr)


def assistant(expr: str | Expression | None = None) -> Expression:
    """A turn of the assistant."""
    return _role("assistant", expr)


def system_begin() -> Expression:
    """The system's turn begins."""
    return RoleBegin("system")


def system_end() -> Expression:
    """The system's turn ends."""
    return RoleEnd("system")


def user_begin() -> Expression:
    """The user's turn begins."""
    return RoleBegin("user")


def user_end() -> Expression:
    """The user's turn ends."""
    return RoleEnd("user")


def assistant_begin() -> Expression:
    """The assistant's turn begins."""
    return RoleBegin("assistant")


def assistant_end() -> Expression:
    """The assistant's turn ends."""
    return RoleEnd("assistant")
