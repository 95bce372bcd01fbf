"""Makes states from artefacts: their sources are compiled in a process of their own, and what comes of it is kept.

The index of 262 144 tokens takes 0.5 s and the import of the library 5 s of a slow core; a grammar's compiled form takes up to
some MB, so the kept ones are bounded by their bytes.
"""

from __future__ import annotations

import importlib.util
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from sapwood_common.errors import ConfigError, DeadlineExceededError, InvalidArgumentError
from sapwood_common.grammar.artefact import GrammarArtefact
from sapwood_worker.model.grammar.backend import GrammarNeeds, go_on, read_artefact
from sapwood_worker.model.grammar.bounded_process import BoundedProcesses, ProcessDiedError, TimeUpError
from sapwood_worker.model.grammar.forced import Spellings
from sapwood_worker.model.grammar.token_masks import TokenMasks
from sapwood_worker.model.grammar.xgrammar.compiling import start, tokenizer_info
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
        raise ConfigError("--grammar-backend xgrammar: it is not installed: pip install 'sapwood[xgrammar]'")
    backend = XgrammarBackend(needs)
    backend.warm()
    return backend
