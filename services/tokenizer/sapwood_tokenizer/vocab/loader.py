"""Loads a tokenizer and what belongs to it: chat template, special tokens, ids that end a text.

From a Hugging Face directory or a vocabulary file (``vocabulary_files``), or from the vocabulary inside a GGUF file.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Tokenizer, models

from sapwood_common.errors import ConfigError
from sapwood_common.grammar.vocabulary import byte_level_bytes, sentencepiece_bytes
from sapwood_common.models.end_tokens import end_ids
from sapwood_common.models.gguf_file import GgufError, GgufFile
from sapwood_common.models.model_files import local_path, model_name, resolve_model
from sapwood_common.models.progress import logged
from sapwood_common.models.prompts import NO_PROMPTS, Prompts, read_prompts
from sapwood_text.vocabulary import TokenTable, Vocabulary
from sapwood_tokenizer.vocab.gguf_vocab import HF_JSON, build_tokenizer
from sapwood_tokenizer.vocab.special_tokens import VocabularyError, token_text
from sapwood_tokenizer.vocab.vocabulary_files import load_vocabulary, refuse_settings

logger = logging.getLogger(__name__)

_TURN_ENDS = ("<end_of_turn>", "<|im_end|>", "<|eot_id|>")
"""Tokens that end an assistant's turn, whatever the model calls its end of text."""

_DEFAULT_TEMPLATES = {"gemma3": "gemma.jinja"}
"""Templates for GGUF files that hold none, by architecture."""

_VOCABULARY_SUFFIXES = (".json", ".model", ".tiktoken")

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class LoadedTokenizer:
    """A tokenizer with its files' settings.

    Attributes:
        tokenizer: Encodes and decodes.
        origin: The tokenizer's file.
        vocab_size: Every id is below it.
        bos_token_id: Beginning of text, if the model has one.
        eos_token_ids: The model's end tokens.
        special_ids: Tokens left out of text when special tokens are skipped.
        chat_template: Jinja source, if there is one.
        template_origin: The template's file.
        special_tokens: Names that chat templates use (``bos_token``, ``eos_token``, ...), with their text.
        only_encodes: Whether nothing is ever decoded with it: its model makes embeddings.
        prompts: Texts that go before those to embed.
    """

    tokenizer: Tokenizer
    origin: str
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    special_ids: frozenset[int]
    chat_template: str | None
    template_origin: str
    special_tokens: dict[str, str]
    only_encodes: bool = False
    prompts: Prompts = NO_PROMPTS


def resolve_tokenizer(model: str, revision: str | None = None) -> Path:
    """The file or folder that ``--model`` names, fetched if it is of the hub: a model, a vocabulary file or a folder with one.

    Raises:
        ConfigError: The file or folder does not exist, or cannot be fetched; the message says what to do.
    """
    path = local_path(model)
    if path.is_dir() or (path.suffix in _VOCABULARY_SUFFIXES and path.is_file()):
        return path
    return resolve_model(model, revision, weights=False, progress=logged(logger))


def tokenizer_name(model: str) -> str:
    """The name clients use for a model unless the configuration gives another: what it is called on the hub, the file's own name,
    or its folder's."""
    path = local_path(model)
    if path.suffix in _VOCABULARY_SUFFIXES and path.is_file():
        return path.resolve().parent.name if path.stem in ("tokenizer", "tekken", "tiktoken") else path.stem
    return path.resolve().name if path.is_dir() else model_name(model)


def load_tokenizer(path: Path, chat_template: Path | None = None) -> LoadedTokenizer:
    """Loads the tokenizer of a model.

    Args:
        path: A ``.gguf`` file, a Hugging Face model directory or a vocabulary file; the files that Hugging Face directories
            have are looked for next to it.
        chat_template: A file whose template replaces the model's own.

    Raises:
        ConfigError: A file is missing or cannot be used; the message names it and says why.
    """
    given = (
        None if chat_template is None else _Template(_read_text(chat_template, "--chat-template: "), str(chat_template))
    )
    return _from_gguf(path, given) if path.suffix == ".gguf" and not path.is_dir() else _from_files(path, given)


@dataclass(frozen=True, slots=True)
class _Template:
    source: str
    origin: str


def _from_gguf(path: Path, template: _Template | None) -> LoadedTokenizer:
    try:
        file = GgufFile(path)
    except GgufError as error:
        raise ConfigError(str(error)) from error
    metadata = file.metadata
    file.close()
    try:
        own = metadata.get(HF_JSON)
        tokenizer = _whole_tokenizer(own) if isinstance(own, str) else build_tokenizer(metadata)
    except Exception as error:  # a VocabularyError, or any error of ours or the library's over unexpected values
        raise ConfigError(f"{path}: its vocabulary cannot be used: {error}") from error
    if template is None:
        template = _template_of_gguf(path, metadata)
    ids = {
        name: _known_id(tokenizer, metadata.get(f"tokenizer.ggml.{name}_token_id"))
        for name in ("bos", "eos", "unknown", "padding")
    }
    size = _vocab_size(tokenizer)
    keys = [f"tokenizer.ggml.{name}" for name in ("eos_token_id", "eot_token_id", "eom_token_id", "eos_token_ids")]
    ends = [each for key in keys for each in end_ids(metadata.get(key), size, f"{path}: {key}")]
    named = {"bos_token": ids["bos"], "eos_token": ids["eos"], "unk_token": ids["unknown"], "pad_token": ids["padding"]}
    texts = {name: _text_of(tokenizer, index) for name, index in named.items() if index is not None}
    return _loaded(path, tokenizer, ids["bos"], ends, template, texts, size)


def _whole_tokenizer(content: str) -> Tokenizer:
    """The tokenizer of a ``tokenizer.json``. Raises VocabularyError."""
    with TemporaryDirectory(prefix="sapwood-tokenizer-") as folder:
        file = Path(folder) / "tokenizer.json"
        file.write_text(content, encoding="utf-8", errors="surrogateescape")
        try:
            tokenizer = load_vocabulary(file, {}).tokenizer
        except ConfigError as error:
            raise VocabularyError(str(error).replace(str(file), HF_JSON)) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _template_of_gguf(path: Path, metadata: dict[str, Any]) -> _Template | None:
    own = metadata.get("tokenizer.chat_template")
    if isinstance(own, str):
        return _Template(own, str(path))
    name = _DEFAULT_TEMPLATES.get(str(metadata.get("general.architecture")))
    if name is None:
        return None
    return _Template(
        resources.files("sapwood_tokenizer.template").joinpath("templates", name).read_text(encoding="utf-8"), name
    )


def _from_files(path: Path, template: _Template | None) -> LoadedTokenizer:
    directory = path if path.is_dir() else path.parent
    settings = _read_json(directory / "special_tokens_map.json") | _read_json(directory / "tokenizer_config.json")
    vocabulary = load_vocabulary(path, settings)
    refuse_settings(directory, vocabulary.file, settings)
    tokenizer = vocabulary.tokenizer
    generation, model = _read_json(directory / "generation_config.json"), _read_json(directory / "config.json")
    if template is None:
        template = _template_of_directory(directory, settings)
    texts = vocabulary.special_tokens | {
        name: text for name in _NAMED_TOKENS if (text := token_text(settings.get(name))) is not None
    }
    rows = model.get("vocab_size")
    size = _vocab_size(tokenizer, rows if isinstance(rows, int) else 0)
    # The tokenizer's own end token comes first, as chat templates mean that one.
    own = _own_id(tokenizer, texts.get("eos_token"))
    eos = [] if own is None else [own]
    eos += _end_ids_of_model(directory, generation, model, size)
    bos = _own_id(tokenizer, texts.get("bos_token"))
    bos = _known_id(tokenizer, model.get("bos_token_id")) if bos is None else bos
    for name, given in (("bos_token", bos), ("eos_token", eos[0] if eos else None)):
        index = _known_id(tokenizer, given)
        if index is not None:
            texts.setdefault(name, _text_of(tokenizer, index))
    # Files saved after training may truncate or pad texts; prompts must not be cut silently.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    loaded = _loaded(vocabulary.file, tokenizer, bos, eos, template, texts, size)
    return replace(
        loaded,
        only_encodes=_only_encodes(tokenizer, model.get("architectures")),
        prompts=read_prompts(directory / "config_sentence_transformers.json"),
    )


def _end_ids_of_model(directory: Path, generation: dict[str, Any], model: dict[str, Any], size: int) -> list[int]:
    """The end tokens of generation_config.json, or of config.json if that has none; the log names ids that are none."""
    nested = model.get("text_config")
    for file, values in (
        ("generation_config.json", generation),
        ("config.json", model),
        ("config.json", nested if isinstance(nested, dict) else {}),
    ):
        if ids := end_ids(values.get("eos_token_id"), size, f"{directory / file}: eos_token_id"):
            return ids
    return []


def vocabulary_of(loaded: LoadedTokenizer) -> Vocabulary | None:
    """The tokens of a model, for decoding answers; None if the model gives none and the tokenizer's decoder is unknown.

    Raises:
        ConfigError: The decoder is unknown and the model gives answers; the message names the file and says why.
    """
    try:
        table = token_table(loaded.tokenizer, loaded.origin)
    except ConfigError as error:
        if not loaded.only_encodes:
            raise
        logger.info("%s; Detokenize is refused", error)
        return None
    special = {index: _text_of(loaded.tokenizer, index) for index in sorted(loaded.special_ids)}
    return Vocabulary(table, loaded.vocab_size, special)


def _only_encodes(tokenizer: Tokenizer, architectures: Any) -> bool:
    if isinstance(architectures, list) and architectures:
        return not any(end in str(architectures[0]) for end in ("ForCausalLM", "ForConditionalGeneration"))
    return isinstance(tokenizer.model, models.WordPiece)  # only encoders have it


def _loaded(
    path: Path,
    tokenizer: Tokenizer,
    bos: int | None,
    ends: list[int],
    template: _Template | None,
    special_tokens: dict[str, str],
    vocab_size: int,
) -> LoadedTokenizer:
    added = tokenizer.get_added_tokens_decoder()
    turn_ends = map(tokenizer.token_to_id, _TURN_ENDS)
    eos = ends + [index for index in turn_ends if index is not None and index in added]
    return LoadedTokenizer(
        tokenizer=tokenizer,
        origin=str(path),
        vocab_size=vocab_size,
        bos_token_id=bos,
        eos_token_ids=tuple(dict.fromkeys(eos)),
        special_ids=frozenset(index for index, token in added.items() if token.special),
        chat_template=None if template is None else template.source,
        template_origin="" if template is None else template.origin,
        special_tokens=special_tokens,
    )


def _vocab_size(tokenizer: Tokenizer, model_rows: int = 0) -> int:
    """How many ids there are. A model may have more rows than its tokenizer has tokens; an id beyond the tokens has no text."""
    added = max(tokenizer.get_added_tokens_decoder(), default=-1)
    return max(tokenizer.get_vocab_size(), added + 1, model_rows)


def _template_of_directory(path: Path, settings: dict[str, Any]) -> _Template | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return _Template(_read_text(file), str(file))
    file = path / "tokenizer_config.json"
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates: "default" is the one for plain chat
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return _Template(template, str(file)) if isinstance(template, str) else None


def _known_id(tokenizer: Tokenizer, index: Any) -> int | None:
    return index if isinstance(index, int) and index >= 0 and tokenizer.id_to_token(index) is not None else None


def _own_id(tokenizer: Tokenizer, token: str | None) -> int | None:
    return None if token is None else tokenizer.token_to_id(token)


def _text_of(tokenizer: Tokenizer, index: int) -> str:
    return tokenizer.id_to_token(index) or ""


def _read_text(path: Path, prefix: str = "") -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{prefix}cannot read {path}: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return content


_SPACE = "\u2581"


def token_table(tokenizer: Tokenizer, origin: str = "the tokenizer") -> TokenTable:
    """The bytes of each token.

    Args:
        tokenizer: The tokenizer.
        origin: The file it is from, for the error.

    Raises:
        ConfigError: Its decoder is of neither kind.
    """
    steps = _decoder_steps(tokenizer)
    kinds = [step["type"] for step in steps]
    byte_level = kinds == ["ByteLevel"]
    if not byte_level and not (steps and all(map(_is_understood, steps))):
        raise ConfigError(
            f"{origin}: its decoder ({'+'.join(kinds) or 'none'}) is not supported: answers are decoded token by token, "
            "which takes byte-level BPE or SentencePiece"
        )
    bytes_of = byte_level_bytes if byte_level else sentencepiece_bytes

    def spell(token_id: int) -> bytes:
        token = tokenizer.id_to_token(token_id)
        return b"" if token is None else bytes_of(token)

    strips = any(
        (step["type"] == "Strip" and step["start"] == 1)
        or (step["type"] == "Metaspace" and step.get("prepend_scheme") != "never")
        for step in steps
    )
    return TokenTable(spell, strips_leading_space=strips)


def _is_understood(step: dict[str, Any]) -> bool:
    """Whether a step of a decoder is one of SentencePiece's, with its usual settings."""
    match step:
        case {"type": "Replace", "pattern": {"String": pattern}, "content": content}:
            return bool(pattern == _SPACE and content == " ")
        case {"type": "Strip", "content": " ", "start": start, "stop": 0}:
            return start in (0, 1)
        case {"type": "Metaspace", "replacement": replacement}:
            return bool(replacement == _SPACE)
        case _:
            return step["type"] in ("ByteFallback", "Fuse")


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    if tokenizer.decoder is None:
        return []
    state = json.loads(tokenizer.decoder.__getstate__())
    return list(state["decoders"]) if state["type"] == "Sequence" else [state]
