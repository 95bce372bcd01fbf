"""What generation_config.json says of sampling and of the ends of answers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import gguf
import pytest

from sapwood_common.errors import ConfigError
from sapwood_worker.model.checkpoint.generation_config import read_hf_eos, read_sampling_defaults


def write(folder: Path, **files: dict[str, Any]) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_sampling_defaults_are_those_of_the_file(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == {}
    qwen3 = {
        "bos_token_id": 151643,
        "do_sample": True,
        "eos_token_id": [151645, 151643],
        "pad_token_id": 151643,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "transformers_version": "4.51.0",
    }
    found = read_sampling_defaults(write(tmp_path, generation_config=qwen3))
    assert found == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


def test_sampling_defaults_of_a_gguf_file_are_read_unless_a_file_beside_it_has_some(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_sampling_temp(0.7)
    writer.add_sampling_top_p(0.95)
    writer.add_sampling_top_k(40)
    writer.add_sampling_penalty_repeat(1.1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = {"temperature": 0.7, "top_p": 0.95, "top_k": 40, "repetition_penalty": 1.1}
    assert read_sampling_defaults(path) == found
    write(tmp_path, generation_config={"temperature": 0.2})
    assert read_sampling_defaults(path) == {"temperature": 0.2}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", 2.5),
        ("repetition_penalty", True),
    ],
)
def test_a_default_that_cannot_be_one_is_dropped_with_a_line(name, value, tmp_path: Path, caplog) -> None:
    write(tmp_path, generation_config={name: value, "min_p": 0.1})
    with caplog.at_level(logging.WARNING):
        assert read_sampling_defaults(tmp_path) == {"min_p": 0.1}
    assert f"generation_config.json: {name} is {value!r}" in caplog.text


def test_a_setting_of_generation_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"generation_config\.json: steering \(3\)"):
        read_sampling_defaults(write(tmp_path, generation_config={"steering": 3}))


ADDED = {
    "added_tokens_decoder": {
        "7": {"content": "<|im_end|>", "special": True},
        "8": {"content": "</s>"},
        "9": {"content": "<|end|>"},
    }
}


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({"config": {"eos_token_id": 2}}, {2}),
        ({"config": {"eos_token_id": 2}, "generation_config": {"eos_token_id": [5, 6]}}, {5, 6}),
        ({"config": {"eos_token_id": 2}, "generation_config": {"eos_token_id": None}}, {2}),
        ({"config": {"eos_token_id": 2}, "tokenizer_config": {"eos_token": "</s>", **ADDED}}, {2, 7, 8}),
        (
            {"config": {"eos_token_id": 2}, "tokenizer_config": {"eos_token": {"content": "<|end|>"}, **ADDED}},
            {2, 7, 9},
        ),
        ({"config": {}, "tokenizer_config": {"chat_template": "{{ m }}<|end|>\n", **ADDED}}, {7, 9}),
        ({"config": {"text_config": {"eos_token_id": [1, 106]}}}, {1}),
        (
            {
                "config": {},
                "tokenizer_config": {"eos_token": "<e>"},
                "tokenizer": {"added_tokens": [], "model": {"vocab": {"<e>": 3}}},
            },
            {3},
        ),
    ],
)
def test_all_that_files_name_as_an_end_ends_an_answer(files, ends, tmp_path: Path) -> None:
    assert set(read_hf_eos(write(tmp_path, **files), 100)) == ends


@pytest.mark.parametrize("file", ["config", "generation_config"])
@pytest.mark.parametrize("none", [-1, 100, 2**32, "2", 2.0, True, [None, 4], [4, -1], [4, 100]])
def test_an_id_that_is_no_token_is_dropped_with_a_line_that_names_file_and_key(
    file, none, tmp_path: Path, caplog
) -> None:
    write(tmp_path, **{"config": {}, file: {"eos_token_id": none}})
    with caplog.at_level(logging.WARNING):
        assert read_hf_eos(tmp_path, 100) == ((4,) if isinstance(none, list) else ())
    assert f"{file}.json: eos_token_id: " in caplog.text
