import json
import logging
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from sapwood_common.errors import ConfigError, InvalidArgumentError
from sapwood_common.models.prompts import Prompts
from sapwood_tokenizer.template.chat_template import ChatTemplate
from sapwood_tokenizer.vocab.loader import LoadedTokenizer, load_tokenizer, token_table


@pytest.fixture
def directory(byte_level: Tokenizer, tmp_path: Path) -> Path:
    byte_level.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "eos_token_id": 1}))
    settings = {"eos_token": {"content": "<|im_end|>"}, "chat_template": "{{ messages[0]['content'] }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def test_a_hugging_face_directory_loads(directory: Path, byte_level: Tokenizer) -> None:
    loaded = load_tokenizer(directory)
    assert loaded.tokenizer.encode("hello").ids == byte_level.encode("hello").ids
    assert loaded.eos_token_ids == (1,)
    assert loaded.special_ids == {0, 1}
    assert loaded.chat_template == "{{ messages[0]['content'] }}"
    assert loaded.vocab_size == byte_level.get_vocab_size()


def test_what_a_saved_tokenizer_would_cut_or_pad_is_encoded_whole(directory: Path, byte_level: Tokenizer) -> None:
    cutting = Tokenizer.from_str(byte_level.to_str())
    cutting.enable_truncation(3)
    cutting.enable_padding(length=50)
    cutting.save(str(directory / "tokenizer.json"))
    text = "a text of more than three tokens"
    assert load_tokenizer(directory).tokenizer.encode(text).ids == byte_level.encode(text).ids


def test_rows_of_the_model_beyond_the_tokenizer_are_ids_without_text(directory: Path, byte_level: Tokenizer) -> None:
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 512}))
    loaded = load_tokenizer(directory)
    assert loaded.vocab_size == 512
    assert token_table(loaded.tokenizer).of(500) == b""


def test_templates_get_the_tokenizers_own_end_token(directory: Path) -> None:
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 1]}))
    loaded = load_tokenizer(directory)
    assert loaded.special_tokens["eos_token"] == "<|im_end|>"
    assert set(loaded.eos_token_ids) == {0, 1}


def test_a_template_file_wins_over_the_models_own(directory: Path, tmp_path: Path) -> None:
    (directory / "chat_template.jinja").write_text("from file")
    assert load_tokenizer(directory).chat_template == "from file"
    own = tmp_path / "own.jinja"
    own.write_text("own")
    assert load_tokenizer(directory, own).chat_template == "own"


def test_named_special_tokens_reach_the_template(directory: Path) -> None:
    (directory / "special_tokens_map.json").write_text(json.dumps({"pad_token": "<|im_end|>", "eos_token": "other"}))
    settings = {
        "bos_token": "<|im_start|>",
        "eos_token": {"content": "<|im_end|>"},
        "unk_token": None,
        "chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}, "odd", {}],
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    loaded = load_tokenizer(directory)
    assert loaded.special_tokens == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
    }
    assert loaded.bos_token_id == 0
    assert loaded.chat_template == "yes"


@pytest.mark.parametrize("ends", [1, [1, 0], [1, 9999, None, "x"], 9999, "x"])
def test_end_tokens_come_from_the_generation_config_first(directory: Path, ends: object) -> None:
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    assert load_tokenizer(directory).eos_token_ids == ((1, 0) if ends == [1, 0] else (1,))


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_an_end_id_that_is_no_token_is_named_with_file_and_key(directory: Path, file: str, caplog) -> None:
    (directory / file).write_text(json.dumps({"eos_token_id": [1, 9999]}))
    with caplog.at_level(logging.WARNING):
        assert load_tokenizer(directory).eos_token_ids == (1,)
    assert f"{directory / file}: eos_token_id: 9999" in caplog.text


def test_prompts_of_sentence_transformers_are_read(directory: Path) -> None:
    assert load_tokenizer(directory).prompts == Prompts()
    file = directory / "config_sentence_transformers.json"
    file.write_text(json.dumps({"prompts": {"query": "q: ", "document": ""}, "default_prompt_name": "query"}))
    assert load_tokenizer(directory).prompts == Prompts({"query": "q: ", "document": ""}, "query")
    for wrong, name in (
        ({"prompts": {"a": "b"}, "default_prompt_name": "c"}, "default_prompt_name"),
        ({"prompts": {"a": 1}}, "prompts"),
        ({"prompts": ["a"]}, "prompts"),
    ):
        file.write_text(json.dumps(wrong))
        with pytest.raises(ConfigError, match=rf"config_sentence_transformers\.json: {name}"):
            load_tokenizer(directory)


OF_TRANSFORMERS: dict[str, object] = {
    "add_bos_token": True, "add_eos_token": True, "add_prefix_space": True, "legacy": False, "do_lower_case": True,
    "padding_side": "left", "truncation_side": "left", "max_length": 1, "stride": 2, "model_input_names": ["input_ids"],
    "clean_up_tokenization_spaces": True, "spaces_between_special_tokens": True, "use_default_system_prompt": True,
    "image_token": "<|im_end|>", "strip_accents": True, "tokenize_chinese_chars": False, "sp_model_kwargs": {"a": 1},
    "errors": "ignore", "trim_offsets": False, "additional_special_tokens": [], "made_up": 5,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(OF_TRANSFORMERS))
def test_settings_beside_a_tokenizer_json_change_no_tokens_with_transformers_either(directory: Path, name: str) -> None:
    import transformers

    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", name: OF_TRANSFORMERS[name]}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    text = "Hello, World! é <|im_end|> 123"
    ids = transformers.AutoTokenizer.from_pretrained(directory)(text)["input_ids"]
    assert ids == load_tokenizer(directory).tokenizer.encode(text).ids


@pytest.mark.parametrize("name", ["split_special_tokens", "fix_mistral_regex"])
def test_settings_that_change_tokens_are_refused_by_name(directory: Path, name: str) -> None:
    (directory / "tokenizer_config.json").write_text(json.dumps({name: False}))
    load_tokenizer(directory)
    (directory / "tokenizer_config.json").write_text(json.dumps({name: True}))
    with pytest.raises(ConfigError, match=rf"tokenizer_config\.json: {name}"):
        load_tokenizer(directory)


def test_a_template_that_is_not_utf8_is_named(directory: Path) -> None:
    (directory / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja"):
        load_tokenizer(directory)


@pytest.mark.parametrize("broken", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_broken_file_is_named(directory: Path, broken: str) -> None:
    (directory / broken).write_text("{ not json")
    with pytest.raises(ConfigError, match=broken.replace(".", r"\.")):
        load_tokenizer(directory)


def test_missing_files_are_named(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.jinja"):
        load_tokenizer(directory, tmp_path / "nowhere.jinja")
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"holds no tokenizer\.json"):
        load_tokenizer(directory)
    garbage = tmp_path / "x.gguf"
    garbage.write_bytes(b"GGUF\x03")
    with pytest.raises(ConfigError, match=r"x\.gguf"):
        load_tokenizer(garbage)


def test_the_demo_model_speaks_gemmas_chat_format(demo: LoadedTokenizer) -> None:
    assert demo.chat_template is not None
    template = ChatTemplate(demo.chat_template, demo.special_tokens)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hi "},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    assert template.render(messages, add_generation_prompt=True) == (
        "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n"
        "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n"
    )
    with pytest.raises(InvalidArgumentError, match="role judge"):
        template.render([{"role": "judge", "content": "x"}], add_generation_prompt=True)


@pytest.mark.parametrize(
    "hostile",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ raise_exception('no') }}",
        "{{ messages[7].content }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_that_does_what_it_must_not_is_stopped(hostile: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        ChatTemplate(hostile, {}).render([{"role": "user", "content": "x"}], add_generation_prompt=True)
    assert caught.value.field == "messages"


def test_a_template_that_is_no_template_is_refused_with_its_line() -> None:
    with pytest.raises(ConfigError, match="line 2"):
        ChatTemplate("ok\n{% if %}", {})
