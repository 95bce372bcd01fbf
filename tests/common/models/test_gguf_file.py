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
    with pytest.raises(GgufError, match="cannot be read"):
        GgufFile(other)
    with pytest.raises(GgufError, match="cannot be read"):
        GgufFile(tmp_path / "absent.gguf")
