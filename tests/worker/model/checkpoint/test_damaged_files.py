"""Damaged files of models end in errors that name the file, whatever was damaged: headers, settings of the wrong types."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sapwood_common.errors import ConfigError
from sapwood_kernels.ops.factory import device_ops
from sapwood_testing.models.gguf_files import write_gguf
from sapwood_testing.models.tiny_models import make_tiny
from sapwood_tokenizer.vocab.loader import load_tokenizer
from sapwood_worker.model.loader import load_model

NUMBERS = [0, 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1]
WRONG: list[Any] = [
    None,
    True,
    -1,
    0,
    10**30,
    1.5,
    1e308,
    float("nan"),
    "",
    "x",
    "../../x\n\x1b[2J",
    [],
    [None],
    {},
    {"rope_type": 7},
    [[[]]],
]


def load(path: Path) -> None:
    load_model(path, "auto", torch.float32, device_ops("cpu"), context_length=None, threads=1, seed=0)


def named_or_fine(path: Path, name: str, *reads: Callable[[Path], object]) -> bool:
    """Whether all reads work; they may refuse, with the file's name."""
    for read in reads:
        try:
            read(path)
        except ConfigError as error:
            assert name in str(error), str(error)
            return False
    return True


def damaged(header: bytes, chance: random.Random) -> bytes:
    found = bytearray(header)
    for _ in range(chance.choice([1, 1, 2, 4])):
        at = chance.randrange(len(found))
        match chance.randrange(6):
            case 0:
                found[at] = chance.randrange(256)
            case 1:
                found[at : at + 8] = struct.pack("<Q", chance.choice(NUMBERS))
            case 2:
                found[at : at + 4] = struct.pack("<I", chance.choice(NUMBERS) % 2**32)
            case 3:
                del found[at : at + chance.randrange(1, 20)]
            case 4:
                found[at:at] = chance.randbytes(chance.randrange(1, 20))
            case _:
                found[at] ^= 1 << chance.randrange(8)
    return bytes(found)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    path = folder / "damaged.gguf"
    write_gguf(path, make_tiny("llama", folder / "tiny").oracle, "llama")
    return path


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_damaged_gguf_headers_end_in_errors_that_name_the_file(gguf: Path, count: int) -> None:
    raw = gguf.read_bytes()
    chance = random.Random(count)
    refused = 0
    try:
        for _ in range(count):
            gguf.write_bytes(damaged(raw[:4352], chance) + raw[4352:])
            refused += not named_or_fine(gguf, gguf.name, load, load_tokenizer)
    finally:
        gguf.write_bytes(raw)
    assert refused > count / 2


def changed_entry(header: bytes, chance: random.Random) -> bytes:
    """A safetensors header with one entry that says something else."""
    found = json.loads(header)
    name = chance.choice([key for key in found if key != "__metadata__"])
    entry = found[name]
    match chance.randrange(7):
        case 0:
            entry["dtype"] = chance.choice(["F64", "I8", "BF16", "F8_E4M3", "X", 7, None, "BOOL", "F4", "E8M0"])
        case 1:
            entry["shape"] = chance.choice([[], [0], [2**40], [2**63, 2**63], [-1], "x", None, [1.5], [10**30]])
        case 2:
            entry["data_offsets"] = chance.choice([[0, 0], [0, 2**60], [2**64 - 1, 0], [-4, 0], "x", None, [1]])
        case 3:
            found[chance.choice(["", "a" * 70_000, "\x1b[2J", "model.layers.99999999999.mlp.up_proj.weight"])] = entry
        case 4:
            del found[name]
        case 5:
            found["__metadata__"] = chance.choice([None, 7, {"a": 1}, {"format": "x\n"}, []])
        case _:
            found[name] = chance.choice([None, [], 7, {}])
    return json.dumps(found).encode()


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_damaged_safetensors_headers_end_in_errors_that_name_the_file(tmp_path: Path, count: int) -> None:
    make_tiny("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    raw = file.read_bytes()
    end = 8 + struct.unpack("<Q", raw[:8])[0]
    chance = random.Random(count)
    refused = 0
    for number in range(count):
        if number % 2:
            head = damaged(raw[:end], chance)
        else:
            changed = changed_entry(raw[8:end], chance)
            changed += b" " * (-len(changed) % 8)
            head = struct.pack("<Q", len(changed)) + changed
        file.write_bytes(head + raw[end:])
        refused += not named_or_fine(tmp_path, str(tmp_path), load)
    assert refused > count / 2


def keys(settings: dict[str, Any], above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for key, value in settings.items():
        found.append((*above, key))
        if isinstance(value, dict):
            found += keys(value, (*above, key))
    return found


def replaced(settings: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(settings))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return copy


FURTHER = (
    "rope_scaling",
    "sliding_window",
    "layer_types",
    "quantization_config",
    "text_config",
    "partial_rotary_factor",
)


@pytest.mark.parametrize(
    ("name", "values"),
    [("llama", WRONG[::4]), *(pytest.param(each, WRONG, marks=pytest.mark.slow) for each in ("gemma3", "deepseek-v2"))],
)
def test_every_setting_of_a_wrong_type_ends_in_an_error_that_names_the_file(
    tmp_path: Path, name: str, values: list[Any]
) -> None:
    make_tiny(name, tmp_path)
    config = tmp_path / "config.json"
    right = json.loads(config.read_text())
    for path in [*keys(right), *((each,) for each in FURTHER)]:
        for value in values:
            config.write_text(json.dumps(replaced(right, path, value)))
            named_or_fine(tmp_path, str(tmp_path), load)


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("gemma3", ("rms_norm_eps",), -1),
        ("deepseek-v2", ("rope_parameters", "factor"), 10**30),
        ("deepseek-v2", ("rope_parameters", "original_max_position_embeddings"), -1),
        ("deepseek-v2", ("rope_parameters", "rope_theta"), 1),
        ("deepseek-v2", ("rope_parameters", "rope_theta"), float("nan")),
    ],
)
def test_numbers_with_which_nothing_can_be_computed_are_refused(
    tmp_path: Path, name: str, path: tuple[str, ...], value: float
) -> None:
    make_tiny(name, tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(replaced(json.loads(config.read_text()), path, value)))
    with pytest.raises(ConfigError, match=str(tmp_path)):
        load(tmp_path)
