"""Tokenizers written as metadata of GGUF files are read back with the ids, ends and template of the original."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from sapwood_common.errors import ConfigError
from sapwood_tokenizer.vocab.gguf_vocab import HF_JSON, PRE_TOKENIZERS, WHOLE_WORDS, build_tokenizer
from sapwood_tokenizer.vocab.loader import LoadedTokenizer, load_tokenizer
from sapwood_tokenizer.vocab.special_tokens import VocabularyError
from sapwood_tokenizer.vocab.write_gguf_vocab import gguf_vocabulary

KINDS = {
    "demo": ("llama", "default"), "mistral": ("llama", "default"), "llama3": ("gpt2", "llama-bpe"), "qwen3": ("gpt2", "qwen2"),
    "deepseek": ("gpt2", "deepseek-v3"),
}  # fmt: skip


@pytest.fixture(scope="session", params=list(KINDS))
def written(request: pytest.FixtureRequest) -> tuple[str, LoadedTokenizer, dict[str, Any]]:
    """A published tokenizer, and its metadata."""
    loaded: LoadedTokenizer = request.getfixturevalue(request.param)
    found = gguf_vocabulary(loaded, loaded.vocab_size)
    assert found.difference == ""
    assert HF_JSON not in found.metadata
    return request.param, loaded, found.metadata


def test_the_metadata_are_those_of_published_files(written) -> None:
    name, loaded, metadata = written
    assert (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"]) == KINDS[name]
    assert len(metadata["tokenizer.ggml.tokens"]) == len(metadata["tokenizer.ggml.token_type"]) == loaded.vocab_size
    opens = loaded.tokenizer.encode("").ids == [loaded.bos_token_id]
    assert metadata["tokenizer.ggml.add_bos_token"] == opens
    assert metadata.get("tokenizer.ggml.bos_token_id") == loaded.bos_token_id
    assert metadata["tokenizer.ggml.eos_token_id"] == loaded.eos_token_ids[0]
    assert metadata.get("tokenizer.chat_template") == loaded.chat_template


@settings(max_examples=60)
@given(
    text=st.text(max_size=40)
    | st.text(alphabet=st.sampled_from("aeiot'sLRD 129\n\r\t.,!/_-é東한🤷\u2581"), max_size=60)
    | st.lists(st.sampled_from(["<|im_end|>", "<eos>", "</s>", "[INST]", " x", "\n\n", "12345"])).map("".join)
)
@example(text="e\u0301 ﬁ")
def test_ids_are_those_of_the_original(written, built, text: str) -> None:
    name, loaded, _ = written
    ids = loaded.tokenizer.encode(text).ids
    assert built[name].encode(text).ids == ids
    assert built[name].decode(ids) == loaded.tokenizer.decode(ids)


@pytest.fixture(scope="session")
def built(written) -> dict[str, Tokenizer]:
    name, _, metadata = written
    return {name: build_tokenizer(metadata)}


def test_the_corpus_has_the_ids_of_the_original(written, built, corpus) -> None:
    name, loaded, _ = written
    for text in corpus:
        assert built[name].encode(text).ids == loaded.tokenizer.encode(text).ids


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_each_pre_tokenizer_that_is_read_is_written_by_a_name_that_cuts_alike(pre: str, byte_level: Tokenizer) -> None:
    tokens = [byte_level.id_to_token(index) for index in range(byte_level.get_vocab_size())]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 2),
        "tokenizer.ggml.merges": [" ".join(each) for each in json.loads(byte_level.to_str())["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    found = gguf_vocabulary(loaded_of(build_tokenizer(metadata)), len(tokens)).metadata["tokenizer.ggml.pre"]
    assert PRE_TOKENIZERS[found] == PRE_TOKENIZERS[pre]
    assert (found in WHOLE_WORDS) == (pre in WHOLE_WORDS)


def loaded_of(tokenizer: Tokenizer, **changes: Any) -> LoadedTokenizer:
    loaded = LoadedTokenizer(
        tokenizer=tokenizer,
        origin="tokenizer.json",
        vocab_size=tokenizer.get_vocab_size(),
        bos_token_id=0,
        eos_token_ids=(1,),
        special_ids=frozenset({0, 1}),
        chat_template=None,
        template_origin="",
        special_tokens={},
    )
    return replace(loaded, **changes)


def test_rows_without_a_token_are_unused_and_tokens_without_a_row_are_left_out(byte_level: Tokenizer, corpus) -> None:
    size = byte_level.get_vocab_size()
    wide = gguf_vocabulary(loaded_of(byte_level), size + 3).metadata
    assert wide["tokenizer.ggml.tokens"][size:] == [f"[PAD{index}]" for index in range(size, size + 3)]
    assert wide["tokenizer.ggml.token_type"][size:] == [5, 5, 5]
    narrow = build_tokenizer(gguf_vocabulary(loaded_of(byte_level), size - 20).metadata)
    assert narrow.get_vocab_size() == size - 20
    for text in corpus:
        assert build_tokenizer(wide).encode(text).ids == byte_level.encode(text).ids
        assert narrow.decode(narrow.encode(text).ids) == text


def test_texts_that_begin_and_end_with_tokens_do_so_afterwards(byte_level: Tokenizer) -> None:
    tokenizer = Tokenizer.from_str(byte_level.to_str())
    around = [("<|im_start|>", 0), ("<|im_end|>", 1)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", pair="$A $B", special_tokens=around
    )
    built = build_tokenizer(gguf_vocabulary(loaded_of(tokenizer), tokenizer.get_vocab_size()).metadata)
    assert built.encode("hi").ids == tokenizer.encode("hi").ids
    with pytest.raises(VocabularyError, match=r"it puts \['<\|im_start\|>', '<\|im_end\|>'\] around a text"):
        gguf_vocabulary(loaded_of(tokenizer, eos_token_ids=(7,)), tokenizer.get_vocab_size())


def odd(byte_level: Tokenizer, how: str) -> Tokenizer:
    """A tokenizer that GGUF files cannot hold."""
    tokenizer = Tokenizer.from_str(byte_level.to_str())
    match how:
        case "words":
            tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
            tokenizer.decoder = decoders.ByteLevel()
        case "unigram":
            tokenizer = Tokenizer(models.Unigram([("a", -1.0), ("b", -2.0)], unk_id=0))
        case "cut":
            step = pre_tokenizers.Split(Regex(r"[aeiou]+"), behavior="isolated")
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([step, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        case "prefix":
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        case "lower":
            tokenizer.normalizer = normalizers.Lowercase()
        case "bytes":
            tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("words", "its model is WordLevel; GGUF files that can be written have BPE"),
        ("unigram", "its model is Unigram"),
        ("cut", r"none of the pre-tokenizers of GGUF files cuts texts as it does \(gpt-2, default, "),
        ("prefix", "none of the pre-tokenizers"),
        ("lower", "none of the pre-tokenizers"),
        ("bytes", r"a GGUF file cannot say how it cuts .* \(its tokens \[.*\] would be \[.*\]\), and \d+ texts more"),
    ],
)
def test_what_a_file_cannot_say_is_refused_with_the_reason(how: str, message: str, byte_level: Tokenizer) -> None:
    tokenizer = odd(byte_level, how)
    with pytest.raises(VocabularyError, match=message):
        gguf_vocabulary(loaded_of(tokenizer), tokenizer.get_vocab_size())


def write(path: Path, metadata: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        kind = gguf.GGUFValueType.UINT32 if type(value) is int else gguf.GGUFValueType.get_type(value)
        writer.add_key_value(key, value, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def first_word_spaced(mistral: LoadedTokenizer) -> Tokenizer:
    """The tokenizer as Mistral's later files have it: a space goes before the text, and not after a special token."""
    state = json.loads(mistral.tokenizer.to_str())
    state["normalizer"] = None
    state["pre_tokenizer"] = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
    return Tokenizer.from_str(json.dumps(state))


def stripping(byte_level: Tokenizer) -> Tokenizer:
    tokenizer = Tokenizer.from_str(byte_level.to_str())
    tokenizer.add_special_tokens([AddedToken("<|tool|>", lstrip=True, rstrip=True)])
    return tokenizer


@pytest.mark.parametrize("kind", ["first word spaced", "stripping"])
def test_a_tokenizer_that_a_vocabulary_says_almost_is_written_whole_too(
    kind: str, mistral: LoadedTokenizer, byte_level: Tokenizer, corpus: list[str], tmp_path: Path
) -> None:
    loaded = (
        loaded_of(stripping(byte_level))
        if kind == "stripping"
        else replace(mistral, tokenizer=first_word_spaced(mistral))
    )
    found = gguf_vocabulary(loaded, loaded.vocab_size)
    assert re.fullmatch(r".* \(its tokens \[.*\] would be \[.*\]\)", found.difference)
    read = load_tokenizer(write(tmp_path / "model.gguf", found.metadata))
    for text in (*corpus, "[INST] hi [/INST] <|tool|> x"):
        assert read.tokenizer.encode(text).ids == loaded.tokenizer.encode(text).ids
    assert (read.bos_token_id, read.eos_token_ids[0]) == (loaded.bos_token_id, loaded.eos_token_ids[0])
    del found.metadata[HF_JSON]
    other = load_tokenizer(write(tmp_path / "other.gguf", found.metadata))
    alike = [text for text in corpus if other.tokenizer.encode(text).ids == loaded.tokenizer.encode(text).ids]
    assert len(alike) > 0.8 * len(corpus)


@pytest.mark.parametrize("content", ["{", "[]", '{"model": 5}', "", "\udcff"])
def test_a_whole_tokenizer_that_is_none_is_named_with_its_file(
    content: str, byte_level: Tokenizer, tmp_path: Path
) -> None:
    metadata = gguf_vocabulary(loaded_of(byte_level), byte_level.get_vocab_size()).metadata
    raw: Any = content.encode("utf-8", "surrogateescape")
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", metadata["tokenizer.ggml.tokens"])
    writer.add_key_value(HF_JSON, raw, gguf.GGUFValueType.STRING)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        ConfigError, match=r"model\.gguf: its vocabulary cannot be used: tokenizer\.huggingface\.json: "
    ):
        load_tokenizer(path)
