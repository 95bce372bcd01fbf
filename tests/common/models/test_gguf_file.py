import math
import os
import random
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from sapwood_common.models.gguf_file import GgufError, GgufFile


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_float32("llama.rope.freq_base", 0.5)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_array("tokenizer.ggml.tokens", ["a", "é", "\u2581the", ""])
    writer.add_array("tokenizer.ggml.scores", [0.0, -1.5, 2.0, 3.0])
    writer.add_tensor("x.weight", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("y.weight", np.arange(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_reads_what_the_gguf_library_wrote(written: Path) -> None:
    file = GgufFile(written)
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["llama.block_count"] == 2
    assert file.metadata["llama.rope.freq_base"] == 0.5
    assert file.metadata["tokenizer.ggml.add_bos_token"] is True
    assert file.metadata["tokenizer.ggml.tokens"] == ["a", "é", "\u2581the", ""]
    assert file.metadata["tokenizer.ggml.scores"] == [0.0, -1.5, 2.0, 3.0]
    x, y = file.tensors["x.weight"], file.tensors["y.weight"]
    assert x.shape == (3, 4)
    assert np.array_equal(np.frombuffer(file.data(x, 48), np.float32).reshape(3, 4), np.arange(12).reshape(3, 4))
    assert np.array_equal(np.frombuffer(file.data(y, 10), np.float16), np.arange(5))


def test_every_truncation_is_a_clear_error(written: Path, tmp_path: Path) -> None:
    whole = written.read_bytes()
    broken = tmp_path / "broken.gguf"
    for size in (1, 3, 10, 30, 100, 200):
        broken.write_bytes(whole[:size])
        with pytest.raises(GgufError, match=r"broken\.gguf"):
            GgufFile(broken)
    broken.write_bytes(whole[:-32])
    file = GgufFile(broken)
    with pytest.raises(GgufError, match=r"tensor y\.weight"):
        file.data(file.tensors["y.weight"], 10)


def test_another_format_is_named_as_such(tmp_path: Path) -> None:
    other = tmp_path / "model.gguf"
    other.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(GgufError, match="not a GGUF file"):
        GgufFile(other)
    other.write_bytes(b"")
    with pytest.raises(GgufError, match="is empty"):
        GgufFile(other)
    with pytest.raises(GgufError, match="cannot be read"):
        GgufFile(tmp_path / "absent.gguf")


def test_every_damaged_header_is_the_one_error(written: Path, tmp_path: Path) -> None:
    whole = written.read_bytes()
    rng, path, refused = random.Random(3), tmp_path / "damaged.gguf", 0
    for _ in range(1500):
        content = bytearray(whole)
        for _ in range(rng.choice((1, 1, 4))):
            at = rng.randrange(4, len(content))
            if rng.random() < 0.5:
                content[at] = rng.choice((0, 1, 9, 8, 0x7F, 0x80, 0xFF))
            else:
                content[at : at + 8] = rng.choice((0, 1, 2**31, 2**63, 2**64 - 1, 9, 1 << 40)).to_bytes(8, "little")
        path.write_bytes(content)
        try:
            GgufFile(path).close()
        except GgufError as error:
            refused += 1
            assert str(path) in str(error)
    assert refused > 300


def value_of(kind: int, content: bytes) -> bytes:
    """A GGUF file of one key, ``general.alignment``, whose value is of this kind."""
    key = b"general.alignment"
    return b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(key)) + key + struct.pack("<I", kind) + content


@pytest.mark.parametrize(
    "content",
    [
        value_of(4, struct.pack("<I", 0)),
        value_of(5, struct.pack("<i", -32)),
        value_of(6, struct.pack("<f", math.nan)),
        value_of(8, struct.pack("<Q", 2) + b"32"),
        value_of(9, struct.pack("<IQ", 4, 1) + struct.pack("<I", 32)),
        value_of(9, struct.pack("<IQ", 9, 1) * 20_000),
        value_of(9, struct.pack("<IQ", 0, 2**64 - 1)),
        value_of(77, b""),
        b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0),
        b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"t" + struct.pack("<I", 2**32 - 1),
        b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"t" + struct.pack("<IQQIQ", 2, 2**63, 2**63, 0, 0),
    ],
)
def test_a_header_with_impossible_values_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(GgufError, match=r"x\.gguf"):
        GgufFile(tmp_path / "x.gguf")


def test_a_pipe_is_no_gguf_file_and_keeps_nobody_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.gguf")
    with pytest.raises(GgufError, match="is no file"):
        GgufFile(tmp_path / "x.gguf")


@pytest.mark.parametrize("where", ["key", "tensor", "text", "token"])
def test_a_string_longer_than_any_is_refused_before_decoding(tmp_path: Path, where: str) -> None:
    long = struct.pack("<Q", (1 << 24) + 1) + b"\xff" * ((1 << 24) + 1)
    named = struct.pack("<Q", 1) + b"k"
    head = b"GGUF" + struct.pack("<IQQ", 3, where == "tensor", where != "tensor")
    body = {
        "key": long,
        "tensor": long,
        "text": named + struct.pack("<I", 8) + long,
        "token": named + struct.pack("<IIQ", 9, 8, 1) + long,
    }[where]
    path = tmp_path / "long.gguf"
    path.write_bytes(head + body)
    with pytest.raises(GgufError, match=r"a string of 16777217 bytes|more bytes than"):
        GgufFile(path)


def test_the_only_tensor_that_is_there_twice_is_named(tmp_path: Path) -> None:
    def tensor(name: bytes) -> bytes:
        return struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, 1, 0, 0)

    names = [b"t%d" % number for number in range(50_000)] + [b"t49999"]
    path = tmp_path / "twice.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, len(names), 0) + b"".join(map(tensor, names)))
    with pytest.raises(GgufError, match=r"tensor 't49999' is there twice"):
        GgufFile(path)
