"""Makes states from artefacts: their sources are compiled in a process of their own, and what comes of it is kept.

The index of 262 144 tokens takes 0.5 s and the import of the library 5 s of a slow core; a grammar's compiled form takes up to
some MB, so the kept ones are bounded by their bytes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from sapwood_common.errors import ConfigError, DeadlineExceededError, InvalidArgumentError
from sapwood_common.grammar.artefact import GrammarArtefact
from sapwood_common.grammar.json_schema import STEPS, GrammarError
from sapwood_common.grammar.source import GrammarOptions, GrammarSource
from sapwood_worker.model.grammar.backend import GrammarNeeds, go_on, read_artefact
from sapwood_worker.model.grammar.bounded_process import BoundedProcesses, ProcessDiedError, TimeUpError
from sapwood_worker.model.grammar.forced import Spellings
from sapwood_worker.model.grammar.token_masks import TokenMasks
from sapwood_worker.model.grammar.xgrammar.checks import checked_schema, checked_tag
from sapwood_worker.model.grammar.xgrammar.matcher import XgrammarState, mask_of

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


# What runs in the process that compiles: the library bounds neither its time nor its memory.
_MOST_WHITESPACE = 32
_LONGEST_MESSAGE = 400


def tokenizer_info(tokens: Sequence[bytes], end_token_ids: Sequence[int]) -> Any:
    """The library's index of a vocabulary; a token without bytes is never allowed, unless it is an end."""
    import xgrammar

    return xgrammar.TokenizerInfo(
        list(tokens), vocab_type=xgrammar.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=list(end_token_ids)
    )


def start(settings: bytes) -> Callable[[bytes], bytes]:
    """What answers a source by ``+`` and the compiled grammar, or by ``-`` and why there is none.

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
    """Compiles; leaves out more and more of lenient schemas until what is left compiles."""
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
