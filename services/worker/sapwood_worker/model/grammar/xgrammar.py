"""Makes states from compiled grammars: sources are compiled in a separate process, and results are kept.

The index of 262 144 tokens takes 0.5 s and the import of the library 5 s of a slow core; a grammar's compiled form takes up to
some MB, so the kept ones are bounded by their bytes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sapwood_common.errors import ConfigError, DeadlineExceededError, InvalidArgumentError
from sapwood_common.grammar.artefact import GrammarArtefact
from sapwood_common.grammar.json_schema import STEPS, GrammarError, all_schemas, relax, tighten_formats
from sapwood_common.grammar.source import GrammarOptions, GrammarSource
from sapwood_common.grammar.structural_tag import format_of
from sapwood_worker.model.grammar.backend import (
    ForcedText,
    GrammarNeeds,
    Spellings,
    TokenMasks,
    forced_by,
    go_on,
    only_token,
    read_artefact,
)
from sapwood_worker.model.grammar.bounded_process import BoundedProcesses, ProcessDiedError, TimeUpError

_MAX_KEPT_BYTES = 256 << 20


class XgrammarBackend:
    """Implements :class:`~sapwood_worker.model.grammar.backend.GrammarBackend`.

    Args:
        needs: The vocabulary, and what a grammar may take.
        max_kept_bytes: Most bytes of compiled grammars kept for later requests; the least recently used goes first.
    """

    def __init__(self, needs: GrammarNeeds, max_kept_bytes: int = _MAX_KEPT_BYTES) -> None:
        import xgrammar

        vocabulary = needs.vocabulary
        self._library = xgrammar
        self._fingerprint = vocabulary.fingerprint
        self._timeout = needs.timeout
        special = vocabulary.special_ids | set(needs.eos_token_ids)
        known = vocabulary.tokens[: needs.vocab_size]
        tokens = [b"" if index in special else token for index, token in enumerate(known)]
        tokens += [b""] * (needs.vocab_size - len(tokens))
        self._ends = tuple(needs.eos_token_ids)
        if not self._ends:  # the model has none: one beyond its tokens
            self._ends = (len(tokens),)
            tokens.append(b"")
        self.columns = len(tokens)
        self._spellings = Spellings(tokens)
        usable = [*(index for index, token in enumerate(tokens) if token), *self._ends]
        self._usable = mask_of(usable, -(-len(tokens) // 32))
        self._info = tokenizer_info(tokens, self._ends)
        settings = {
            "tokens": [token.decode("latin-1") for token in tokens],
            "ends": self._ends,
            "special": vocabulary.special_names,
        }
        self._processes = BoundedProcesses(
            f"{start.__module__}:{start.__name__}", json.dumps(settings).encode(), needs.timeout
        )
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()
        self._kept_bytes = 0
        self._max_kept_bytes = max_kept_bytes

    @property
    def num_kept(self) -> int:
        """Grammars kept for later requests."""
        return len(self._kept)

    def warm(self) -> None:
        """Starts the process that compiles."""
        self._processes.warm()

    def build(self, compiled: bytes, generated: Sequence[int] = ()) -> XgrammarState:
        artefact = read_artefact(compiled, self._fingerprint)
        matcher = self._library.GrammarMatcher(self._compiled(artefact))
        state = XgrammarState(matcher, self._ends, self._spellings, self._usable)
        go_on(state.accept_all(generated), generated)
        return state

    def masks(self) -> TokenMasks:
        return TokenMasks(self.columns)

    def close(self) -> None:
        self._processes.close()

    def _compiled(self, artefact: GrammarArtefact) -> Any:
        with self._lock:
            kept = self._kept.get(artefact.key)
            if kept is not None:
                self._kept.move_to_end(artefact.key)
                return kept[0]
        serialised = self._compile(artefact)
        grammar = self._library.CompiledGrammar.deserialize_json(serialised.decode(), self._info)
        with self._lock:
            if artefact.key not in self._kept:
                self._kept[artefact.key] = grammar, len(serialised)
                self._kept_bytes += len(serialised)
            while self._kept_bytes > self._max_kept_bytes:
                _, (_, size) = self._kept.popitem(last=False)
                self._kept_bytes -= size
        return grammar

    def _compile(self, artefact: GrammarArtefact) -> bytes:
        source = artefact.source
        field = f"grammar.{source.kind}"
        question = json.dumps(
            [source.kind, source.text, source.options.any_whitespace, source.options.lenient]
        ).encode()
        try:
            answer = self._processes.call(question)
        except TimeUpError:
            raise DeadlineExceededError(
                f"{field} was not compiled within {self._timeout:.3g} s: it is too complex", field=field
            ) from None
        except ProcessDiedError:
            raise InvalidArgumentError("the grammar needs too much memory to compile", field=field) from None
        if answer[:1] == b"-":
            raise InvalidArgumentError(f"the grammar cannot be compiled: {answer[1:].decode()}", field=field)
        return answer[1:]


def make_xgrammar(needs: GrammarNeeds) -> XgrammarBackend:
    """The backend, its first process started.

    Raises:
        ConfigError: The library is not installed.
    """
    if importlib.util.find_spec("xgrammar") is None:
        raise ConfigError("--structured-output backend=xgrammar: it is not installed: pip install 'sapwood[xgrammar]'")
    backend = XgrammarBackend(needs)
    backend.warm()
    return backend


# The code of the compiling process: the library bounds neither its time nor its memory.
_MOST_WHITESPACE = 32
_LONGEST_MESSAGE = 400


def tokenizer_info(tokens: Sequence[bytes], end_token_ids: Sequence[int]) -> Any:
    """The library's index of a vocabulary; a token without bytes is never allowed, unless it is an end."""
    import xgrammar

    return xgrammar.TokenizerInfo(
        list(tokens), vocab_type=xgrammar.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=list(end_token_ids)
    )


def start(settings: bytes) -> Callable[[bytes], bytes]:
    """Returns a function that answers a source with ``+`` and the compiled grammar, or with ``-`` and an error.

    Args:
        settings: JSON: tokens (in Latin-1), ends, special (names).
    """
    import xgrammar

    given = json.loads(settings)
    info = tokenizer_info([token.encode("latin-1") for token in given["tokens"]], given["ends"])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def answer(question: bytes) -> bytes:
        kind, text, whitespace, lenient = json.loads(question)
        source = GrammarSource(kind, text, GrammarOptions(whitespace, lenient))
        try:
            return b"+" + str(_compile(compiler, source, given["special"]).serialize_json()).encode()
        except GrammarError as error:
            message = str(error)
        except (MemoryError, RecursionError):
            message = "it is too large or nested too deep"
        except RuntimeError as error:
            message = f"the grammar backend xgrammar cannot compile it: {_readable(str(error))}"
        return b"-" + message[:_LONGEST_MESSAGE].encode()

    return answer


def _compile(compiler: Any, source: GrammarSource, special_names: Sequence[str]) -> Any:
    """Compiles a schema; leaves out more and more of a lenient schema until the rest compiles."""
    if source.kind not in ("json_schema", "structural_tag"):
        return _compile_step(compiler, source, special_names, 0)
    try:
        return _compile_step(compiler, source, special_names, 0)
    except (GrammarError, RuntimeError):
        if not source.options.lenient and '"lenient": true' not in source.text:
            raise
        for step in range(1, STEPS):
            with contextlib.suppress(GrammarError, RuntimeError):
                return _compile_step(compiler, source, special_names, step)
        return _compile_step(compiler, source, special_names, STEPS)


def _compile_step(compiler: Any, source: GrammarSource, special_names: Sequence[str], step: int) -> Any:
    match source.kind:
        case "json_schema":
            return compiler.compile_json_schema(
                checked_schema(source.text, lenient=source.options.lenient, step=step),
                any_whitespace=source.options.any_whitespace,
                separators=None if source.options.any_whitespace else (",", ":"),
                strict_mode=False,
                max_whitespace_cnt=_MOST_WHITESPACE if source.options.any_whitespace else None,
            )
        case "regex":
            return compiler.compile_regex(source.text)
        case "ebnf":
            if "::=" in source.text:
                return compiler.compile_grammar(source.text)
            return compiler.compile_lark(source.text)
        case "structural_tag":
            return compiler.compile_structural_tag(checked_tag(source, special_names, step))


def _readable(message: str) -> str:
    """The library's message without the place in its sources."""
    return " ".join(re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", message).split())


# Parts of a schema that xgrammar does not enforce: refused by name, because it would only log a warning or ignore them.
#
# Found by generating at random from the schemas of ``tests/fixtures/json_schemas`` and validating what came.


_SAYS_NOTHING = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$defs", "definitions")
)
_NUMBER = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
_OF_TYPE: dict[str, frozenset[str]] = {
    "string": frozenset(("minLength", "maxLength", "pattern")),
    "integer": _NUMBER,
    "number": _NUMBER,
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems")),
    "object": frozenset(("properties", "required", "additionalProperties", "minProperties", "maxProperties")),
    "boolean": frozenset(),
    "null": frozenset(),
}
_WHOLE = ("$ref", "enum", "const", "anyOf", "oneOf", "allOf")
_BESIDE = {"enum": {"type"}, "const": {"type"}}
_COUNT_AT_GROUPS_END = re.compile(r"\}\)[?*+{]")
"""The library makes ``(a[0-9]{1,3})?`` to ``(a?[0-9]{1,3})?`` inside a string of JSON."""
_CLASS = re.compile(r"\[(?:\\.|[^\]\\])*\]")
_OF_MANY = re.compile(r'(?<!\\)\.|\\[DWSsntrfv\\]|\\[xu0]|"')
_ESCAPED_IN_JSON = ['"', "\\", *map(chr, range(32))]
_TEXTS = ("begin", "end", "value", "separator")


def checked_schema(text: str, *, lenient: bool, step: int = 0) -> str:
    """The schema, a JSON text, with formats of dates and times and lengths of strings as expressions.

    Args:
        text: The schema.
        lenient: Whether what cannot be enforced is to be ignored.
        step: How much is left out of a lenient schema, as ``json_schema.relax`` says.

    Raises:
        GrammarError: Something in it would not be enforced; its keyword is named.
    """
    root = json.loads(text)
    if not isinstance(root, dict):
        return text
    if lenient and step:
        root, _ = relax(root, step, lambda pattern: "any expression may be at fault")
    tighten_formats(root)
    if not lenient:
        for schema in all_schemas(root):
            _check(schema)
    for schema in all_schemas(root):
        _bound_by_pattern(schema)
    return json.dumps(root, ensure_ascii=False)


def _check(schema: dict[str, Any]) -> None:
    keys = {
        key for key in schema if key not in _SAYS_NOTHING and not key.startswith(("$schema", "$id", "$comment", "x-"))
    }
    for whole in _WHOLE:
        if whole in keys:
            _refuse(keys - {whole} - _BESIDE.get(whole, set()), f"beside {whole}")
            if whole == "allOf" and len(schema["allOf"]) > 1:
                raise _not_enforced("allOf of several schemas")
            return
    named = schema.get("type", _implied(keys))
    types = named if isinstance(named, list) else [named]
    allowed = frozenset[str]().union(*(_OF_TYPE.get(str(each), frozenset()) for each in types))
    _refuse(keys - allowed - {"type"}, f"in a schema of type {named}" if named else "without a type")
    if "pattern" in keys and keys & {"minLength", "maxLength"}:
        raise _not_enforced("minLength and maxLength beside pattern")
    _check_pattern(str(schema.get("pattern", "")))
    undeclared = set(schema.get("required", ())) - set(schema.get("properties", ()))
    if undeclared:
        raise _not_enforced(f"required {sorted(undeclared)[0]!r}, which is none of the properties")


def _check_pattern(pattern: str) -> None:
    """Raises GrammarError unless the library keeps to the pattern and to JSON, where some characters must be escaped."""
    if _COUNT_AT_GROUPS_END.search(pattern):
        raise _not_enforced("a pattern that repeats a group which ends with a counted repetition")
    classes = [re.compile(each) for each in _CLASS.findall(pattern)]
    if _OF_MANY.search(_CLASS.sub("", pattern)) or any(
        each.match(text) for each in classes for text in _ESCAPED_IN_JSON
    ):
        raise _not_enforced("a pattern that matches quotes, backslashes or control characters, which JSON escapes")


def _bound_by_pattern(schema: dict[str, Any]) -> None:
    """Writes the bounds of a string's length as an expression: the library's own lets control characters through."""
    least, most = schema.get("minLength"), schema.get("maxLength")
    if "pattern" not in schema and (least or most is not None):
        bounds = f"{int(least or 0)},{'' if most is None else int(most)}"
        schema["pattern"] = rf'^[^"\\\x00-\x1f]{{{bounds}}}$'
        schema.pop("minLength", None)
        schema.pop("maxLength", None)


def _implied(keys: set[str]) -> str | None:
    """The type that the library assumes for a schema without a type."""
    if "properties" in keys or "additionalProperties" in keys:
        return "object"
    return "array" if keys & {"items", "prefixItems"} else None


def _refuse(keys: set[str], where: str) -> None:
    if keys:
        raise _not_enforced(f"{sorted(keys)[0]} {where}")


def _not_enforced(what: str) -> GrammarError:
    return GrammarError(f"the grammar backend xgrammar does not enforce {what}")


def checked_tag(source: GrammarSource, special_names: Sequence[str], step: int = 0) -> str:
    """A structural tag as the library reads it, JSON; ``step`` as for :func:`checked_schema`.

    Raises:
        GrammarError: Something in it would not be enforced.
    """
    node = format_of(json.loads(source.text))
    return json.dumps({"type": "structural_tag", "format": _checked_node(node, source, special_names, step)})


def _checked_node(node: Any, source: GrammarSource, special_names: Sequence[str], step: int) -> Any:
    if isinstance(node, list):
        return [_checked_node(each, source, special_names, step) for each in node]
    if not isinstance(node, dict):
        return node
    for text in (*(node.get(key) for key in _TEXTS), *node.get("triggers", ())):
        special = next((name for name in special_names if isinstance(text, str) and name in text), None)
        if special is not None:
            raise GrammarError(
                f"the grammar backend xgrammar cannot have the special token {special!r} in a structural tag"
            )
    result = {
        key: _checked_node(value, source, special_names, step) for key, value in node.items() if key != "json_schema"
    }
    if "json_schema" in node:
        lenient = node.get("lenient", source.options.lenient) is True
        result["json_schema"] = json.loads(checked_schema(json.dumps(node["json_schema"]), lenient=lenient, step=step))
        result.pop("lenient", None)
        result.pop("field", None)
    return result


# One request's place in its grammar, over xgrammar's matcher.
#
# The library bounds no mask's work, so the time is looked at: a mask or a token that takes more CPU time than
# ``SLOW_SECONDS`` is the last of its request, which ends with an error.


SLOW_SECONDS = 1.0


class XgrammarState:
    """Implements :class:`~sapwood_worker.records.grammar_state.GrammarState`.

    Args:
        matcher: The library's, of this request's own, at the start of the grammar.
        end_token_ids: Those that may follow a complete text.
        spellings: The spellings of the tokens.
        usable: A mask of the tokens that may ever come: the library also sets bits beyond the last.
    """

    def __init__(
        self, matcher: Any, end_token_ids: Sequence[int], spellings: Spellings, usable: npt.NDArray[np.int32]
    ) -> None:
        self._matcher = matcher
        self._ends = frozenset(end_token_ids)
        self._spellings = spellings
        self._forced = ForcedText(spellings)
        self._usable = usable
        self._end_mask = mask_of(end_token_ids, len(usable))
        self._error = ""

    @property
    def finished(self) -> bool:
        if self._error or self._matcher.is_terminated():
            return True
        if not self._matcher.is_completed():
            return False
        mask = np.zeros_like(self._end_mask)
        self._fill(mask)
        return bool((mask == self._end_mask).all())

    @property
    def error(self) -> str:
        return self._error

    def accept(self, token_id: int) -> bool:
        if self._error:
            return False
        began = time.thread_time()
        if self._matcher.is_terminated() or not self._matcher.accept_token(token_id):
            self._error = f"the grammar does not allow token {token_id} here"
        self._look_at_time(began)
        return not self._error

    def accept_all(self, token_ids: Sequence[int]) -> int:
        """Advances over tokens of an earlier try; stops at the first that is not allowed; returns how many were."""
        for count, token in enumerate(token_ids):
            if self._matcher.is_terminated() or not self._matcher.accept_token(token):
                return count
        return len(token_ids)

    def validate(self, token_ids: Sequence[int]) -> int:
        if self._error:
            return 0
        accepted = self.accept_all(token_ids)
        if accepted:
            self._matcher.rollback(accepted)
        return accepted

    def rollback(self, count: int) -> None:
        """Takes back the last ``count`` accepted tokens, end tokens included."""
        if count:
            self._matcher.rollback(count)

    def fill(self, mask: npt.NDArray[np.int32]) -> None:
        if self._error or self._matcher.is_terminated():
            mask[:] = 0
            mask[: len(self._end_mask)] = self._end_mask
            return
        self._fill(mask)
        if not mask.any():
            self._error = "after some text nothing may follow"
            mask[: len(self._end_mask)] = self._end_mask

    def forced(self) -> int | None:
        if self._error or self._matcher.is_terminated():
            return None
        if not forced_by(self.forced_text(), self._spellings):
            return None
        mask = np.zeros_like(self._end_mask)
        self._fill(mask)
        token = only_token(mask)
        return None if token in self._ends else token

    def guess(self, most: int, token_ids: Sequence[int], start: int) -> list[int]:
        return [] if self._error else self._forced.draft(self, most, token_ids, start)

    def forced_text(self) -> bytes:
        """As :class:`~sapwood_worker.model.grammar.backend.DraftEngine`."""
        if self._matcher.is_terminated():
            return b""
        return bytes(self._matcher.find_jump_forward_string().encode("utf-8", "surrogateescape"))

    def take(self, token_ids: list[int]) -> int:
        """As :class:`~sapwood_worker.model.grammar.backend.DraftEngine`."""
        return self.accept_all(token_ids)

    def close(self) -> None:
        """The library frees it."""

    def _fill(self, mask: npt.NDArray[np.int32]) -> None:
        began = time.thread_time()
        words = mask[: len(self._end_mask)]
        self._matcher.fill_next_token_bitmask(words[None])
        words &= self._usable
        self._look_at_time(began)

    def _look_at_time(self, began: float) -> None:
        if time.thread_time() - began > SLOW_SECONDS:
            self._error = f"the grammar is too complex: a token took longer than {SLOW_SECONDS:.0f} s"


def mask_of(token_ids: Sequence[int], words: int) -> npt.NDArray[np.int32]:
    """A mask, int32 [words], that allows these tokens."""
    bits = np.zeros(words * 32, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
