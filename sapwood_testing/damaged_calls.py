"""Damages right tool calls and reasoning, and checks what the parsers make of them.

``python -m sapwood_testing.damaged_calls --cases 200000`` runs that many cases, spread over all parsers, and prints a line for
each parser. Case ``n`` of a seed is always the same; ``--only PARSER:n`` runs one and shows it.

A case is an output with a right call, a damaged one and another right call, perhaps behind reasoning. The rules:

* Nothing raises.
* The result is the same for the whole output, for single characters, and for any other pieces of it.
* All arguments are JSON objects.
* No marker comes out as text. XML's tags of parameters may where two damages left no other tag of the call before them.
* The right calls are found as they are, and the damaged one is at most one more.
* Text before and behind the calls stays as it is; no more than that is text if nothing is damaged.
* Reasoning that is not damaged stays as it is; a call drafted in it is none.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sapwood_text.incremental.events import Event, ParsedOutput, merge
from sapwood_text.output_parser import OutputParser, ParserOptions
from sapwood_text.reasoning_parser import registry as reasoning_parsers
from sapwood_text.tool_parser import registry as tool_parsers
from sapwood_text.tool_parser.tools import Tools

Arguments = dict[str, Any]

_STRING, _INTEGER, _LIST, _OBJECT = {"type": "string"}, {"type": "integer"}, {"type": "array"}, {"type": "object"}
TOOLS: dict[str, dict[str, dict[str, str]]] = {
    "get_weather": {"city": _STRING, "days": _INTEGER},
    "write_file": {"path": _STRING, "content": _STRING, "modes": _LIST},
    "run": {"command": _STRING, "env": _OBJECT, "timeout": _INTEGER},
}
_OFFERED = Tools.from_objects(
    [
        {"function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
        for name, properties in TOOLS.items()
    ]
)


@dataclass(frozen=True)
class Part:
    """A piece of a call: a tag, or what stands between tags."""

    text: str
    is_tag: bool = False


def _parts(*pieces: str) -> list[Part]:
    """Parts of alternating kinds, a tag first."""
    return [Part(piece, index % 2 == 0) for index, piece in enumerate(pieces) if piece]


@dataclass(frozen=True)
class Format:
    """How a parser's calls are written.

    Attributes:
        parser: The parser's name.
        call: Makes a call of a tool's name, its arguments, and how many calls stand before it.
        markers: What must never come out as text.
        between: What stands between two calls.
        in_value: Text of the format that a value may hold.
        around: What stands around all calls.
        marked: Whether a call may stand behind text on its line.
    """

    parser: str
    call: Callable[[str, Arguments, int], list[Part]]
    markers: tuple[str, ...]
    between: str = ""
    in_value: tuple[str, ...] = ()
    around: tuple[str, str] = ("", "")
    marked: bool = True

    @property
    def typed(self) -> bool:
        """Whether the types of arguments are those of the tool's schema."""
        return self.parser in ("qwen3_coder", "minimax_m2", "deepseek_v32", "glm45")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _object(open_tag: str, close_tag: str, name_key: str, arguments_key: str) -> Callable[..., list[Part]]:
    def call(name: str, arguments: Arguments, _index: int) -> list[Part]:
        body = f'{{"{name_key}": "{name}", "{arguments_key}": {json.dumps(arguments)}}}'
        return _parts(open_tag, body, close_tag)

    return call


def _mistral(name: str, arguments: Arguments, _index: int) -> list[Part]:
    return _parts("[TOOL_CALLS]", name, "[ARGS]", json.dumps(arguments))


def _deepseek_v3(name: str, arguments: Arguments, _index: int) -> list[Part]:
    body = f"{name}\n```json\n{json.dumps(arguments)}\n```"
    return _parts("<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>", body, "<｜tool▁call▁end｜>")


def _deepseek_v31(name: str, arguments: Arguments, _index: int) -> list[Part]:
    return _parts("<｜tool▁call▁begin｜>", name, "<｜tool▁sep｜>", json.dumps(arguments), "<｜tool▁call▁end｜>")


def _kimi(name: str, arguments: Arguments, index: int) -> list[Part]:
    return _parts(
        "<|tool_call_begin|>",
        f"functions.{name}:{index}",
        "<|tool_call_argument_begin|>",
        json.dumps(arguments),
        "<|tool_call_end|>",
    )


def _gpt_oss(name: str, arguments: Arguments, _index: int) -> list[Part]:
    head = _parts("<|start|>", "assistant", "<|channel|>", f"commentary to=functions.{name} ")
    return head + _parts("<|constrain|>", "json", "<|message|>", json.dumps(arguments), "<|call|>")


def _pythonic(name: str, arguments: Arguments, _index: int) -> list[Part]:
    body = f"[{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]"
    return _parts("<|python_start|>", body, "<|python_end|>")


def _bare_pythonic(name: str, arguments: Arguments, _index: int) -> list[Part]:
    return [Part(f"[{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]")]


def _gemma(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma, value)) + "]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


def _gemma4(name: str, arguments: Arguments, _index: int) -> list[Part]:
    return _parts("<|tool_call>", f"call:{name}{_gemma(arguments)}", "<tool_call|>")


def _tagged(
    opening: Sequence[str], name_tag: str, parameter: str, value_end: str, closing: Sequence[str], line: str = "\n"
) -> Callable[..., list[Part]]:
    def call(name: str, arguments: Arguments, _index: int) -> list[Part]:
        parts = [part for tag in opening for part in (Part(tag, is_tag=True), Part("\n"))]
        parts += [Part(name_tag.format(name), is_tag=True), Part("\n")]
        for key, value in arguments.items():
            kind = "true" if isinstance(value, str) else "false"
            parts += [
                Part(parameter.format(key, kind), is_tag=True),
                Part(f"{line}{_text(value)}{line}"),
                Part(value_end, is_tag=True),
                Part("\n"),
            ]
        return parts + [part for tag in closing for part in (Part(tag, is_tag=True), Part("\n"))][:-1]

    return call


def _glm(name: str, arguments: Arguments, _index: int) -> list[Part]:
    parts = _parts("<tool_call>", f"{name}\n")
    for key, value in arguments.items():
        parts += _parts("<arg_key>", key, "</arg_key>", "\n", "<arg_value>", _text(value), "</arg_value>", "\n")
    return [*parts, Part("</tool_call>", is_tag=True)]


_DSML = "｜DSML｜"
_DEEPSEEK = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁begin｜>")
_COHERE = ("<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>")
_TOOL_CALL = ("<tool_call>", "</tool_call>")

FORMATS: tuple[Format, ...] = (
    Format("hermes", _object("<tool_call>\n", "\n</tool_call>", "name", "arguments"), _TOOL_CALL, "\n", _TOOL_CALL),
    Format(
        "granite",
        _object("<|tool_call|>[", "]<|/tool_call|>", "name", "arguments"),
        ("<|tool_call|>", "<|/tool_call|>"),
        in_value=("<|/tool_call|>",),
    ),
    Format(
        "cohere", _object("<|START_ACTION|>[", "]<|END_ACTION|>", "tool_name", "parameters"), _COHERE, in_value=_COHERE
    ),
    Format("cohere", _object("<|START_ACTION|>", "<|END_ACTION|>", "tool_name", "parameters"), _COHERE),
    Format("llama3_json", _object("<|python_tag|>", "", "name", "parameters"), ("<|python_tag|>",)),
    Format("llama3_json", _object("", "", "name", "parameters"), ("<|python_tag|>",), "\n", marked=False),
    Format("llama3_json", _object("", "", "name", "parameters"), ("<|python_tag|>",), "; ", marked=False),
    Format("mistral", _mistral, ("[TOOL_CALLS]", "[ARGS]"), in_value=("[TOOL_CALLS]", "[ARGS]")),
    Format("mistral", _object("[TOOL_CALLS][", "]", "name", "arguments"), ("[TOOL_CALLS]",)),
    Format("deepseek", _deepseek_v3, _DEEPSEEK, "\n", _DEEPSEEK),
    Format(
        "deepseek",
        _deepseek_v31,
        _DEEPSEEK,
        in_value=_DEEPSEEK,
        around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    Format(
        "kimi_k2",
        _kimi,
        ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        in_value=("<|tool_call_end|>",),
        around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    Format(
        "gpt_oss",
        _gpt_oss,
        ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>", "<|end|>"),
        in_value=("<|call|>", "<|end|>"),
    ),
    Format("pythonic", _pythonic, ("<|python_start|>", "<|python_end|>"), in_value=("<|python_end|>",)),
    Format("pythonic", _bare_pythonic, ("<|python_end|>",), "\n", marked=False),
    Format("gemma4", _gemma4, ("<|tool_call>", "<tool_call|>", '<|"|>'), in_value=("<tool_call|>",)),
    Format(
        "qwen3_coder",
        _tagged(["<tool_call>"], "<function={}>", "<parameter={}>", "</parameter>", ["</function>", "</tool_call>"]),
        (*_TOOL_CALL, "<function=", "</function>", "<parameter=", "</parameter>"),
        "\n",
        ("</parameter>", "</function>", "</tool_call>"),
    ),
    Format(
        "minimax_m2",
        _tagged(
            ["<minimax:tool_call>"],
            '<invoke name="{}">',
            '<parameter name="{}">',
            "</parameter>",
            ["</invoke>", "</minimax:tool_call>"],
            line="",
        ),
        (
            "<minimax:tool_call>",
            "</minimax:tool_call>",
            "<invoke name=",
            "</invoke>",
            "<parameter name=",
            "</parameter>",
        ),
        "\n",
        ("</parameter>", "</invoke>"),
    ),
    Format(
        "deepseek_v32",
        _tagged(
            [f"<{_DSML}function_calls>"],
            f'<{_DSML}invoke name="{{}}">',
            f'<{_DSML}parameter name="{{}}" string="{{}}">',
            f"</{_DSML}parameter>",
            [f"</{_DSML}invoke>", f"</{_DSML}function_calls>"],
            line="",
        ),
        (f"<{_DSML}", f"</{_DSML}"),
        "\n",
        (f"</{_DSML}parameter>", "</parameter>", f"</{_DSML}invoke>"),
    ),
    Format(
        "minimax_m2",
        _tagged([], '<invoke name="{}">', '<parameter name="{}">', "</parameter>", ["</invoke>"], line=""),
        ("<minimax:tool_call>", "</minimax:tool_call>", "<invoke name=", "</invoke>"),
        "\n",
        ("</parameter>", "</invoke>"),
        around=("<minimax:tool_call>\n", "\n</minimax:tool_call>"),
    ),
    Format(
        "deepseek_v32",
        _tagged(
            [],
            f'<{_DSML}invoke name="{{}}">',
            f'<{_DSML}parameter name="{{}}" string="{{}}">',
            f"</{_DSML}parameter>",
            [f"</{_DSML}invoke>"],
            line="",
        ),
        (f"<{_DSML}", f"</{_DSML}"),
        "\n",
        (f"</{_DSML}parameter>", "</parameter>", f"</{_DSML}invoke>"),
        around=(f"<{_DSML}function_calls>\n", f"\n</{_DSML}function_calls>"),
    ),
    Format(
        "glm45",
        _glm,
        (*_TOOL_CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        "\n",
        ("</arg_value>", "</tool_call>"),
    ),
)

_WORDS = (
    "Rome",
    "a b",
    "x < y",
    "ls -la | grep '1'",
    'say "hi"',
    "é😀",
    "<b>bold</b>",
    "{1}",
    "[2]",
    "",
    "10001",
    "C:\\dir",
    "a\nb",
    "\n",
    "it's",
    "x\\",
    "\\n \\u00e9",
    "\t|",
    '{"a": "b", "c": [1, {}]}',
    '{"name": "run", "arguments": {}}',
    "f(a='b', c=\"d\")",
    "], }, ), :",
    "\U0001f600\u2028",
    '""',
    "null",
    "'''",
)
_XML = ("<parameter name=", "</parameter>")
_AFTER = ("", "", "", "\nThat is all.", "\n\nDone; see above.\n")
_PROSE = ("", "", "I will look that up.\n", "So: ")


def _value(chance: random.Random, kind: str, held: Sequence[str]) -> Any:
    if kind == "integer":
        return chance.randint(-5, 10_000)
    if kind == "array":
        return [chance.choice(_WORDS[:-2]) for _ in range(chance.randint(0, 2))]
    if kind == "object":
        return {f"k{index}": chance.choice(_WORDS) for index in range(chance.randint(0, 2))}
    words = [chance.choice(_WORDS) for _ in range(chance.randint(1, 3))]
    if held and chance.random() < 0.3:
        words.insert(chance.randint(0, len(words) - 1), chance.choice(held))
        words.append("end")
    return " ".join(words).strip()


def _arguments(chance: random.Random, name: str, held: Sequence[str]) -> Arguments:
    return {key: _value(chance, schema["type"], held) for key, schema in TOOLS[name].items() if chance.random() < 0.9}


def _misspelt(chance: random.Random, tag: str) -> str:
    letters = [index for index, char in enumerate(tag) if char.isalpha()]
    at = chance.choice(letters or [0])
    match chance.randint(0, 3):
        case 0:
            return tag[:at] + tag[at + 1 :]
        case 1:
            return tag[:at] + tag[at] + tag[at:]
        case 2:
            return tag[:at] + "q" + tag[at + 1 :]
    return tag[:at] + tag[at : at + 2][::-1] + tag[at + 2 :]


_KINDS = ("missing", "doubled", "misspelt", "nested", "cut", "character", "twice", "none")


def _damaged(chance: random.Random, parts: list[Part], kind: str) -> tuple[str, str]:
    """A call with a damage, and the kind of it: none if the call has no tags."""
    parts = list(parts)
    if kind == "cut":
        text = "".join(part.text for part in parts)
        return text[: chance.randint(1, len(text))], kind
    if kind == "character":
        text = "".join(part.text for part in parts)
        at = chance.randrange(len(text))
        return text[:at] + chance.choice(["", text[at] * 2, "q", "\n"]) + text[at + 1 :], kind
    if kind == "twice":
        once, _ = _damaged(chance, parts, chance.choice(["missing", "doubled", "misspelt", "nested"]))
        return _damaged(chance, [Part(once)], chance.choice(["cut", "character"]))[0], kind
    tags = [index for index, part in enumerate(parts) if part.is_tag]
    if not tags or kind == "none":
        return "".join(part.text for part in parts), "none"
    at = chance.choice(tags)
    tag = parts[at]
    match kind:
        case "missing":
            del parts[at]
        case "doubled":
            parts.insert(at, tag)
        case "misspelt":
            parts[at] = Part(_misspelt(chance, tag.text), is_tag=True)
        case "nested":
            parts.insert(chance.choice(tags), tag)
    return "".join(part.text for part in parts), kind


def _tag_or_damage(chance: random.Random, tag: str) -> str:
    """What stands around the calls: right in most cases, else missing, doubled or misspelt."""
    if not tag or chance.random() < 0.7:
        return tag
    return chance.choice(["", tag * 2, _misspelt(chance, tag)])


@dataclass(frozen=True)
class Case:
    """One output to parse.

    Attributes:
        options: The parsers.
        text: The output.
        kind: The damage.
        calls: The right calls, which must be found in this order.
        markers: What must not come out as text.
        cuts: Where the output is cut into pieces, once more than behind each character.
        before: Text before the calls.
        after: Text behind them.
        thought: The reasoning; None if it is damaged.
        is_whole: Whether nothing behind the reasoning is damaged.
    """

    options: ParserOptions
    text: str
    kind: str
    calls: tuple[tuple[str, Arguments], ...]
    markers: tuple[str, ...]
    cuts: tuple[int, ...]
    before: str = ""
    after: str = ""
    thought: str | None = ""
    is_whole: bool = False


def make_case(parser: str, number: int, seed: int) -> Case:
    """Case ``number`` of a parser; ``parser`` is the name of a tool parser or ``reasoning+tool``."""
    chance = random.Random(f"{seed}/{parser}/{number}")
    reasoning, _, tool = parser.rpartition("+")
    form = chance.choice([form for form in FORMATS if form.parser == tool])
    names = [chance.choice(list(TOOLS)) for _ in range(3)]
    kind = chance.choice(_KINDS)
    example = "".join(part.text for part in form.call("run", {"command": "ls"}, 0))
    inside = (*form.in_value, *((example,) if form.in_value and tool != "gemma4" else ()))
    held = [inside, inside if kind == "none" else (), inside]
    calls = [(name, _arguments(chance, name, inside)) for name, inside in zip(names, held, strict=True)]
    rendered = [form.call(name, arguments, index) for index, (name, arguments) in enumerate(calls)]
    right = ["".join(part.text for part in parts) for parts in rendered]
    damaged, kind = _damaged(chance, rendered[1], kind)
    kept = [calls[0], calls[2]]
    if kind == "none":
        kept = calls
    opening, closing = (_tag_or_damage(chance, tag) if kind == "none" else tag for tag in form.around)
    is_whole = kind == "none" and (opening, closing) == form.around
    text = opening + form.between.join([right[0], damaged, right[2]]) + closing
    after = chance.choice(_AFTER) if form.parser != "gpt_oss" else ""
    if kind in ("cut", "twice") and chance.random() < 0.3:
        text = opening + form.between.join([right[0], damaged])
        kept = calls[:1]
        after = ""
    markers = form.markers
    before, thought = "", None
    if reasoning:
        text, thought = _with_reasoning(chance, reasoning, text, form)
        family = reasoning_parsers.FAMILIES[reasoning]
        markers = (*form.markers, family.opening, family.closing)
    elif form.parser != "gpt_oss":
        before = chance.choice(_PROSE if form.marked else _PROSE[:-1])
        text = before + text
    text += after
    cuts = tuple(sorted(chance.sample(range(len(text) + 1), min(len(text), chance.randint(1, 12)))))
    options = ParserOptions(tool, reasoning, None, _OFFERED if form.typed or chance.random() < 0.8 else Tools())
    return Case(options, text, kind, tuple(kept), markers, cuts, before.strip(), after.strip(), thought, is_whole)


def _with_reasoning(chance: random.Random, name: str, text: str, form: Format) -> tuple[str, str | None]:
    """An output with reasoning before the calls, and that reasoning; None if its tags are damaged."""
    family = reasoning_parsers.FAMILIES[name]
    is_right = chance.random() < 0.6
    inner = chance.choice(["\nI think.\n", "Let me see: a < b, <b>x</b>\n", "\n"])
    if is_right and chance.random() < 0.3:
        draft = "".join(part.text for part in form.call("run", {"command": "ls"}, 0))
        if not any(tag in draft for tag in family.implied_by):
            inner = f"{inner}Perhaps\n{draft}{chance.choice(['', ' or not.'])}\n"
    parts = [
        *([] if family.starts_open and chance.random() < 0.5 else [Part(family.opening, is_tag=True)]),
        Part(inner),
        Part(family.closing, is_tag=True),
    ]
    # Calls without markers are not looked for inside reasoning: then its end is left as it is.
    kinds = ["missing", "doubled", "misspelt", "nested"] if form.marked else ["doubled"]
    written, _ = _damaged(chance, parts, "none" if is_right else chance.choice(kinds))
    return written + chance.choice(["\n\n", ""]) + text, inner.strip() if is_right else None


def parse(options: ParserOptions, pieces: Sequence[str]) -> ParsedOutput:
    """Parse an output given in pieces."""
    parser = OutputParser(options)
    events: list[Event] = []
    for piece in pieces:
        events += parser.feed(piece)
    return merge(events + parser.finish())


def check(case: Case) -> str:
    """The rule that a case breaks, "" if none."""
    whole = parse(case.options, [case.text])
    edges = [0, *case.cuts, len(case.text)]
    for pieces in (list(case.text), [case.text[a:b] for a, b in itertools.pairwise(edges)]):
        if parse(case.options, pieces) != whole:
            return f"{len(pieces)} pieces give another result"
    found = []
    for call in whole.tool_calls:
        try:
            found.append((call.name, json.loads(call.arguments)))
        except ValueError:
            return f"arguments are no JSON: {call.arguments}"
        if not isinstance(found[-1][1], dict) and case.kind not in ("character", "twice"):
            return f"arguments are no object: {call.arguments}"
    for marker in case.markers:
        if marker in whole.text and not (case.kind == "twice" and marker in _XML):
            return f"{marker} is text: {whole.text}"
    left: Iterator[tuple[str, Arguments]] = iter(found)
    for wanted in case.calls:
        if not any(call == wanted for call in left):
            return f"{wanted} is missing in {found}"
    if len(found) > len(case.calls) + {"none": 0, "nested": 2, "twice": 2}.get(case.kind, 1):
        return f"too many calls: {found}"
    if not whole.text.startswith(case.before) or not whole.text.rstrip().endswith(case.after):
        return f"text is lost: {whole.text}"
    if case.is_whole and case.thought is not None and whole.text.split() != f"{case.before} {case.after}".split():
        return f"more is text: {whole.text}"
    if case.options.reasoning_parser and case.thought not in (None, whole.reasoning):
        return f"other reasoning: {whole.reasoning}"
    return ""


def parsers() -> tuple[str, ...]:
    """All that is tried: each tool parser alone, and each reasoning parser before each tool parser."""
    missing = sorted(set(tool_parsers.NAMES) - {form.parser for form in FORMATS})
    if missing:
        raise ValueError(f"no format for {', '.join(missing)}")
    tools = [name for name in tool_parsers.NAMES if name != reasoning_parsers.GPT_OSS]
    return (*tool_parsers.NAMES, *(f"{name}+{tool}" for name in reasoning_parsers.FAMILIES for tool in tools))


def cases(count: int) -> Iterator[tuple[str, int]]:
    """Parser and number of ``count`` cases: half of them tool parsers alone, half with reasoning."""
    alone = parsers()[: len(tool_parsers.NAMES)]
    both = parsers()[len(tool_parsers.NAMES) :]
    for index in range(count):
        group, at = (alone, index // 2) if index % 2 == 0 else (both, index // 2)
        yield group[at % len(group)], at // len(group)


def main() -> int:
    """Run the cases that the command line names."""
    arguments = argparse.ArgumentParser(prog="python -m sapwood_testing.damaged_calls", description=__doc__)
    arguments.add_argument("--cases", type=int, default=200_000, help="how many outputs are damaged")
    arguments.add_argument("--seed", type=int, default=1, help="which ones")
    arguments.add_argument("--only", default="", metavar="PARSER:NUMBER", help="run one case and show it")
    options = arguments.parse_args()
    if options.only:
        parser, _, number = options.only.rpartition(":")
        case = make_case(parser, int(number), options.seed)
        print(case.kind, repr(case.text), parse(case.options, [case.text]), check(case) or "fine", sep="\n")
        return 0
    broken: dict[str, list[str]] = {}
    run: dict[str, int] = {}
    for parser, number in cases(options.cases):
        tool = parser.rpartition("+")[2]
        run[tool] = run.get(tool, 0) + 1
        if fault := check(make_case(parser, number, options.seed)):
            broken.setdefault(tool, []).append(f"{parser}:{number}: {fault}")
    for tool, count in sorted(run.items()):
        faults = broken.get(tool, [])
        print(f"{tool}: {count} cases, {len(faults)} broken rules", *faults[:10], sep="\n  ")
    total = sum(map(len, broken.values()))
    print(f"{sum(run.values())} cases, {total} broken rules")
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
