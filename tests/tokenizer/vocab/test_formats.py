"""Every kind of vocabulary file, compared with the library that the kind is from."""

import argparse
import base64
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
import sentencepiece
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from sapwood.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from sapwood_common.errors import ConfigError
from sapwood_tokenizer.app import load_model
from sapwood_tokenizer.config import TokenizerConfig
from sapwood_tokenizer.vocab.gguf_vocab import build_tokenizer
from sapwood_tokenizer.vocab.loader import (
    LoadedTokenizer,
    load_tokenizer,
    resolve_tokenizer,
    tokenizer_name,
    vocabulary_of,
)
from sapwood_tokenizer.vocab.split_patterns import PATTERNS
from sapwood_tokenizer.vocab.vocabulary_files import refuse_settings

SOURCE = Path(argparse.__file__).read_text()
"""Much text, with no special token's name in it."""
Encode = Callable[[str], list[int]]
TEXTS = st.text(max_size=60) | st.text(st.sampled_from(" \n\t's'RE1234,.aéß東京ひ한👩\u200d🇫\u0301-_/"), max_size=60)


def plain(tokenizer: Tokenizer) -> Encode:
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def published(folder: Path) -> dict:
    return json.loads((folder / "tokenizer.json").read_text())


def expressions(vocabulary: dict) -> tuple[str, ...]:
    splits = [step for step in vocabulary["pre_tokenizer"]["pretokenizers"] if step["type"] == "Split"]
    return tuple(split["pattern"]["Regex"].replace("\r", r"\r").replace("\n", r"\n") for split in splits)


@pytest.fixture(scope="module")
def qwen(packaged: Callable[[str], Path]) -> LoadedTokenizer:
    return load_tokenizer(packaged("qwen") / "qwen.tiktoken")


@pytest.fixture(scope="module")
def pairs(
    packaged: Callable[[str], Path], mistral: LoadedTokenizer, qwen: LoadedTokenizer, tmp_path_factory
) -> dict[str, tuple[Encode, Encode]]:
    """Ours and the original, by kind of file."""
    made: dict[str, tuple[Encode, Encode]] = {}
    model = sentencepiece.SentencePieceProcessor(mistral.origin)
    made["sentencepiece"] = plain(mistral.tokenizer), model.encode

    folder = tmp_path_factory.mktemp("unigram")
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SOURCE.splitlines()), model_writer=trained, vocab_size=300, minloglevel=2
    )
    (folder / "tokenizer.model").write_bytes(trained.getvalue())
    unigram = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())
    made["unigram"] = plain(load_tokenizer(folder).tokenizer), unigram.encode

    file = packaged("qwen") / "qwen.tiktoken"
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, file.read_bytes().splitlines())}
    original = tiktoken.Encoding("qwen", pat_str=PATTERNS["qwen2"][0], mergeable_ranks=ranks, special_tokens={})
    made["tiktoken"] = plain(qwen.tokenizer), original.encode_ordinary

    folder = tmp_path_factory.mktemp("tekken")
    shutil.copy(packaged("mistral") / "tekken_240911.json", folder / "tekken.json")
    content = json.loads((folder / "tekken.json").read_text())
    ranks = {base64.b64decode(one["token_bytes"]): one["rank"] for one in content["vocab"][: 131072 - 1000]}
    tekken = tiktoken.Encoding("t", pat_str=content["config"]["pattern"], mergeable_ranks=ranks, special_tokens={})
    made["tekken"] = (
        plain(load_tokenizer(folder).tokenizer),
        lambda text: [index + 1000 for index in tekken.encode_ordinary(text)],
    )
    return made


@pytest.mark.parametrize(
    ("setting", "value", "harmless"), [("add_prefix_space", False, True), ("sp_model_kwargs", {"alpha": 0.1}, {})]
)
def test_settings_that_change_what_sentencepiece_makes_of_a_text_are_refused(
    setting: str, value: object, harmless: object, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"tokenizer_config\.json: {setting}"):
        refuse_settings(tmp_path, tmp_path / "tokenizer.model", {setting: value})
    for name, each in (("tokenizer.model", harmless), ("tokenizer.json", value)):
        refuse_settings(tmp_path, tmp_path / name, {setting: each})


@pytest.mark.parametrize("kind", ["sentencepiece", "tiktoken", "tekken"])
@settings(max_examples=30, deadline=None)
@given(text=TEXTS)
def test_any_text_is_encoded_as_by_the_library_the_file_is_from(
    pairs: dict[str, tuple[Encode, Encode]], kind: str, text: str
) -> None:
    ours, original = pairs[kind]
    assert ours(text) == list(original(text))


@pytest.mark.parametrize("kind", ["sentencepiece", "tiktoken", "tekken", "unigram"])
def test_the_corpus_is_encoded_as_by_the_library_the_file_is_from(
    pairs: dict[str, tuple[Encode, Encode]], kind: str, corpus: list[str]
) -> None:
    ours, original = pairs[kind]
    for text in [*corpus, SOURCE, SOURCE * 3]:
        assert ours(text) == list(original(text))


def test_control_tokens_of_a_sentencepiece_model_are_special(mistral: LoadedTokenizer) -> None:
    assert mistral.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert (mistral.bos_token_id, mistral.eos_token_ids, mistral.vocab_size) == (1, (2,), 32768)
    assert mistral.tokenizer.encode("[INST]Hi").ids[:2] == [1, 3]
    assert {1, 2, 3, 4} <= mistral.special_ids


def test_words_are_cut_as_the_published_tokenizers_cut_them(packaged: Callable[[str], Path]) -> None:
    for family, package in (("cl100k", "llama3"), ("qwen2", "qwen3"), ("deepseek", "deepseek")):
        assert PATTERNS[family] == expressions(published(packaged(package)))
    tekken = json.loads((packaged("mistral") / "tekken_240718.json").read_text())
    assert PATTERNS["tekken"] == (tekken["config"]["pattern"],)


@pytest.mark.parametrize(("package", "pre"), [("llama3", "llama-bpe"), ("qwen3", "qwen2"), ("deepseek", "deepseek-v3")])
def test_a_gguf_vocabulary_encodes_as_the_published_one_it_is_made_from(
    packaged: Callable[[str], Path], corpus: list[str], package: str, pre: str, request: pytest.FixtureRequest
) -> None:
    loaded: LoadedTokenizer = request.getfixturevalue(package)
    model = published(packaged(package))
    tokens = {index: (token, 1) for token, index in model["model"]["vocab"].items()}
    tokens |= {one["id"]: (one["content"], 3 if one["special"] else 4) for one in model["added_tokens"]}
    merges = [one if isinstance(one, str) else " ".join(one) for one in model["model"]["merges"]]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [tokens[index][0] for index in range(len(tokens))],
        "tokenizer.ggml.token_type": [tokens[index][1] for index in range(len(tokens))],
        "tokenizer.ggml.merges": merges,
    }
    built = build_tokenizer(metadata)
    special = next(one["content"] for one in model["added_tokens"] if one["special"])
    for text in [*corpus, f"{special}a {special}\nb", SOURCE]:
        assert plain(built)(text) == plain(loaded.tokenizer)(text)


def test_a_directory_of_older_files_is_loaded_through_transformers(
    byte_level: Tokenizer, corpus: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = json.loads(byte_level.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(one) for one in model["merges"]))
    settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    loaded = load_tokenizer(tmp_path)
    assert (loaded.bos_token_id, loaded.eos_token_ids) == (0, (1,))
    for text in corpus:
        assert plain(loaded.tokenizer)(text) == plain(byte_level)(text)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"holds no tokenizer\.json.*pip install transformers"):
        load_tokenizer(tmp_path)


def test_tokens_that_the_settings_list_are_added_with_their_ids(
    packaged: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copy(packaged("mistral") / "tokenizer.model.v1", tmp_path / "tokenizer.model")
    added = {"32000": {"content": "<|im_end|>", "special": True}, "2": {"content": "</s>", "special": True}}
    settings = {"added_tokens_decoder": added, "eos_token": "<|im_end|>", "add_bos_token": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    loaded = load_tokenizer(tmp_path)
    assert (loaded.eos_token_ids, loaded.vocab_size) == ((32000,), 32001)
    assert 32000 in loaded.special_ids
    assert loaded.tokenizer.encode("<|im_end|>").ids == [32000]
    settings["added_tokens_decoder"] = {"32007": {"content": "<|far|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=r"'<\|far\|>' the id 32007"):
        load_tokenizer(tmp_path)


def test_a_vocabulary_file_is_a_model_of_its_own(packaged: Callable[[str], Path], tmp_path: Path) -> None:
    file = packaged("llama3") / "tokenizer.json"
    assert resolve_tokenizer(str(file)) == file
    assert tokenizer_name(str(file)) == "models"
    assert tokenizer_name(str(packaged("qwen") / "qwen.tiktoken")) == "qwen"
    assert load_tokenizer(file).eos_token_ids == (128009,)
    (tmp_path / "my-model").mkdir()
    assert tokenizer_name(str(tmp_path / "my-model")) == "my-model"
    with pytest.raises(ConfigError, match="neither"):
        resolve_tokenizer(str(tmp_path / "nothing.model"))


def test_tiktokens_own_special_tokens_are_those_of_the_family(qwen: LoadedTokenizer) -> None:
    assert qwen.tokenizer.encode("<|im_start|>a<|im_end|><|extra_204|>").ids == [151644, 64, 151645, 151850]
    assert qwen.eos_token_ids == (151645,)
    assert len(qwen.special_ids) == 208


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("tokenizer.model", b"\x00\x01garbage", "neither a SentencePiece model nor a tiktoken file"),
        ("tokenizer.model", b"", "without tokens"),
        ("tokenizer.model", b"IQ== 0\nIg== x\n", "line 2"),
        ("few.tiktoken", b"IQ== 0\nIg== 1\n", "2 tokens.*cl100k with 100256"),
        ("tekken.json", b"{}", "not a tekken vocabulary"),
        ("tekken.json", b"[", "not a tekken vocabulary"),
        ("tokenizer.json", b"{}", "Model missing"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_the_reason(
    tmp_path: Path, name: str, content: bytes, reason: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"(?s){name}: .*{reason}"):
        load_tokenizer(tmp_path)


def test_a_sentencepiece_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    trained = io.BytesIO()
    lines = iter(["some words", "of text"] * 9)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_writer=trained,
        vocab_size=12,
        model_type="word",
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (tmp_path / "tokenizer.model").write_bytes(trained.getvalue())
    with pytest.raises(ConfigError, match="neither Unigram nor BPE"):
        load_tokenizer(tmp_path)


def test_a_directory_with_nothing_in_it_says_what_could_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no tokenizer\.json, tokenizer\.model.*transformers finds no"):
        load_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(ConfigError, match=r"transformers finds no tokenizer in it: [^\n]*[^:\s]$"):
        load_tokenizer(tmp_path)  # transformers says why in several lines, of which the first ends in a colon


@pytest.fixture
def word_pieces(tmp_path: Path) -> Path:
    """The tokenizer of an encoder, as sentence embedding models have it."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator([SOURCE], trainer)
    (tmp_path / "encoder").mkdir()
    tokenizer.save(str(tmp_path / "encoder" / "tokenizer.json"))
    return tmp_path / "encoder"


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A tokenizer whose tokens are words, and nothing says what is between them."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "self": 1, "a": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    (tmp_path / "words").mkdir()
    tokenizer.save(str(tmp_path / "words" / "tokenizer.json"))
    return tmp_path / "words"


@pytest.mark.parametrize(
    ("vocabulary", "architecture", "decoder"),
    [
        ("words", None, "none"),
        ("words", "LlamaForCausalLM", "none"),
        ("word_pieces", "Gemma3ForConditionalGeneration", "WordPiece"),
    ],
)
def test_a_vocabulary_that_no_answer_can_be_decoded_with_is_refused_at_the_start(
    request: pytest.FixtureRequest, vocabulary: str, architecture: str | None, decoder: str
) -> None:
    folder: Path = request.getfixturevalue(vocabulary)
    if architecture is not None:
        (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    command = [sys.executable, "-m", "sapwood_tokenizer", "--port", "0", "--metrics-port", "0", "--model", str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert f"tokenizer.json: its decoder ({decoder}) is not supported: answers are decoded token by token" in line


@pytest.mark.parametrize(
    ("vocabulary", "architecture"), [("words", "BertModel"), ("word_pieces", "BertForMaskedLM"), ("word_pieces", None)]
)
def test_an_encoders_vocabulary_need_not_decode(
    request: pytest.FixtureRequest, vocabulary: str, architecture: str | None
) -> None:
    folder: Path = request.getfixturevalue(vocabulary)
    (folder / "config.json").write_text(json.dumps({} if architecture is None else {"architectures": [architecture]}))
    assert vocabulary_of(load_tokenizer(folder)) is None


def test_settings_without_effect_on_an_encoders_tokenizer_are_refused_by_name(word_pieces: Path) -> None:
    for flag, name in (("tool_parser", "--tool-parser"), ("reasoning_parser", "--reasoning-parser")):
        with pytest.raises(ConfigError, match=rf"{name} .*: has no effect with a model that makes embeddings only"):
            load_model(TokenizerConfig.model_validate({"model": str(word_pieces), flag: "none"}), word_pieces)
    with pytest.raises(ConfigError, match="--max-open-streams"):
        load_model(TokenizerConfig(model=str(word_pieces), max_open_streams=5), word_pieces)


async def test_an_encoders_vocabulary_encodes_but_streams_of_it_are_refused(
    word_pieces: Path, start_service: Callable
) -> None:
    service = start_service("--model", str(word_pieces))
    async with grpc.aio.insecure_channel(service.address) as channel:
        stub = tokenizer_pb2_grpc.TokenizerStub(channel)
        response = await stub.Tokenize(tokenizer_pb2.TokenizeRequest(texts=["self"]))
        assert list(response.sequences[0].ids) == load_tokenizer(word_pieces).tokenizer.encode("self").ids
        call = stub.Detokenize()
        await call.write(tokenizer_pb2.DetokenizeRequest(inputs=[{"stream_id": 1, "options": {}}]))
        (output,) = (await call.read()).outputs
        assert (output.error.code, output.ended) == (grpc.StatusCode.UNIMPLEMENTED.value[0], True)
        call.cancel()
