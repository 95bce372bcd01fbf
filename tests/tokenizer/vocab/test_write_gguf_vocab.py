"""Tokenizers written as metadata of GGUF files are read back with the ids, ends and template of the original."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from sapwood_tokenizer.vocab.gguf_vocab import PRE_TOKENIZERS, WHOLE_WORDS, build_tokenizer
from sapwood_tokenizer.vocab.loader import LoadedTokenizer, load_tokenizer
from sapwood_tokenizer.vocab.special_tokens import VocabularyError
from sapwood_tokenizer.vocab.write_gguf_vocab import gguf_metadata

KINDS = {
    "demo": ("llama", "default"), "mistral": ("llama", "default"), "llama3": ("gpt2", "llama-bpe"), "qwen3": ("gpt2", "qwen2"),
    "deepseek": ("gpt2", "deepseek-v3"),
}  # fmt: skip


@pytest.fixture(scope="session", params=list(KINDS))
def written(request: pytest.FixtureRequest) -> tuple[str, LoadedTokenizer, dict[str, Any]]:
    """A published tokenizer, and its metadata."""
    loaded: LoadedTokenizer = request.getfixturevalue(request.param)
    return request.param, loaded, gguf_metadata(loaded, loaded.vocab_size)


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
    found = gguf_metadata(loaded_of(build_tokenizer(metadata)), len(tokens))["tokenizer.ggml.pre"]
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
    wide = gguf_metadata(loaded_of(byte_level), size + 3)
    assert wide["tokenizer.ggml.tokens"][size:] == [f"[PAD{index}]" for index in range(size, size + 3)]
    assert wide["tokenizer.ggml.token_type"][size:] == [5, 5, 5]
    narrow = build_tokenizer(gguf_metadata(loaded_of(byte_level), size - 20))
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
    built = build_tokenizer(gguf_metadata(loaded_of(tokenizer), tokenizer.get_vocab_size()))
    assert built.encode("hi").ids == tokenizer.encode("hi").ids
    with pytest.raises(VocabularyError, match=r"it puts \['<\|im_start\|>', '<\|im_end\|>'\] around a text"):
        gguf_metadata(loaded_of(tokenizer, eos_token_ids=(7,)), tokenizer.get_vocab_size())


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
        case "stripping":
            tokenizer.add_special_tokens([AddedToken("<|tool|>", lstrip=True, rstrip=True)])
    return tokenizer


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("words", "its model is WordLevel; GGUF files that can be written have BPE"),
        ("unigram", "its model is Unigram"),
        ("cut", r"none of the pre-tokenizers of GGUF files cuts texts as it does \(gpt-2, default, "),
        ("prefix", "none of the pre-tokenizers"),
        ("lower", "none of the pre-tokenizers"),
        ("stripping", r"a GGUF file cannot say how it cuts 'see <\|tool\|>here, .*: its tokens \[.*\] would be \["),
    ],
)
def test_what_a_file_cannot_say_is_refused_with_the_reason(how: str, message: str, byte_level: Tokenizer) -> None:
    tokenizer = odd(byte_level, how)
    with pytest.raises(VocabularyError, match=message):
        gguf_metadata(loaded_of(tokenizer), tokenizer.get_vocab_size())


def test_a_sentencepiece_tokenizer_that_spaces_the_first_word_only_is_refused(
    demo: LoadedTokenizer, tmp_path: Path
) -> None:
    state = json.loads(demo.tokenizer.to_str())
    state["normalizer"] = None
    state["pre_tokenizer"] = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(VocabularyError, match="a GGUF file cannot say how it cuts "):
        gguf_metadata(loaded, loaded.vocab_size)
