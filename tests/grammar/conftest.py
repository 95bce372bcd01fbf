"""What the tests of structured output share: the schemas, vocabularies, and compilation in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sapwood_common.grammar.artefact import GrammarArtefact
from sapwood_common.grammar.compile import GrammarBuilder
from sapwood_common.grammar.source import GrammarKind, GrammarOptions, GrammarSource
from sapwood_common.grammar.vocabulary import TokenVocabulary, load_vocabulary
from sapwood_worker.model.grammar.backend import GrammarBackend, GrammarNeeds
from sapwood_worker.model.grammar.llguidance import GrammarStore
from sapwood_worker.model.grammar.registry import make_backend

FOLDER = Path(__file__).resolve().parents[1] / "fixtures" / "json_schemas"
SPECIAL = ("<|end|>", "<|tool|>", "<|eot|>")
WORDS = ("the", " the", "name", '"name', '":', '": ', '{"', '"}', "true", "false", "null", " 1", "12", "  ", "\n")

Compile = Callable[..., bytes]


@pytest.fixture(scope="session")
def json_schemas() -> dict[str, Any]:
    """The hundred schemas by name."""
    return {
        f"{file.stem}.{name}": schema
        for file in sorted(FOLDER.glob("*.json"))
        for name, schema in json.loads(file.read_text(encoding="utf-8")).items()
    }


@pytest.fixture(scope="session")
def vocabulary() -> TokenVocabulary:
    """Tokens 0..255 are the bytes, then some words, then three special tokens; ``<|end|>`` is the first of them."""
    tokens = [*(bytes([byte]) for byte in range(256)), *(word.encode() for word in WORDS)]
    special = range(len(tokens), len(tokens) + len(SPECIAL))
    return TokenVocabulary((*tokens, *(name.encode() for name in SPECIAL)), frozenset(special))


@pytest.fixture(scope="session")
def end_token() -> int:
    """The end token of ``vocabulary``."""
    return 256 + len(WORDS)


MakeStore = Callable[..., GrammarBackend]


@pytest.fixture(scope="session", params=["llguidance", pytest.param("xgrammar", marks=pytest.mark.slow)])
def make_store(request: pytest.FixtureRequest) -> Iterator[MakeStore]:
    """Makes a backend of each kind, once for equal arguments: (vocabulary, columns of the logits, ends, timeout=...)."""
    made: dict[object, GrammarBackend] = {}

    def make(vocabulary: TokenVocabulary, size: int, ends: tuple[int, ...], timeout: float = 30.0) -> GrammarBackend:
        key = vocabulary.fingerprint, size, ends, timeout
        if key not in made:
            made[key] = make_backend(request.param, GrammarNeeds(vocabulary, size, ends, timeout))
        return made[key]

    yield make
    for backend in made.values():
        backend.close()


@pytest.fixture
def store(make_store: MakeStore, vocabulary: TokenVocabulary, end_token: int) -> GrammarBackend:
    """Makes states over ``vocabulary``."""
    return make_store(vocabulary, len(vocabulary.tokens) + 13, (end_token,))


@pytest.fixture(scope="session")
def compile_grammar(vocabulary: TokenVocabulary) -> Compile:
    """Compiles for ``vocabulary`` (or another one) in this process: (kind, source, vocabulary=..., options)."""

    def compile_(kind: GrammarKind, source: Any, vocabulary: TokenVocabulary = vocabulary, **options: bool) -> bytes:
        text = source if isinstance(source, str) else json.dumps(source)
        given = GrammarSource(kind, text, GrammarOptions(**options))
        lark = GrammarBuilder(vocabulary.special_names).compile(given)
        return GrammarArtefact.of(given, vocabulary.fingerprint, lark).to_bytes()

    return compile_


@pytest.fixture(scope="session")
def demo_vocabulary(demo_model: Path) -> TokenVocabulary:
    """The demo model's tokens."""
    loaded = load_vocabulary(demo_model)
    assert loaded is not None
    return loaded


@pytest.fixture(scope="session")
def demo_store(demo_vocabulary: TokenVocabulary) -> GrammarStore:
    """Makes matchers over the demo model's vocabulary; 1 ends text, 106 a turn."""
    return GrammarStore(demo_vocabulary, len(demo_vocabulary.tokens), (1, 106))


@pytest.fixture(scope="session")
def check_json() -> Callable[[bytes, Any], None]:
    """Raises unless a text is JSON that its schema, formats included, admits."""

    def check(text: bytes, schema: Any) -> None:
        import jsonschema  # takes seconds

        cls = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        cls(schema, format_checker=cls.FORMAT_CHECKER).validate(json.loads(text))

    return check
