"""Where adapters are found: folders, the hub, URLs; and in one line why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from sapwood_common.errors import ConfigError
from sapwood_common.models.adapters import CONFIG, WEIGHTS, find_adapter
from sapwood_common.models.hub import Hub
from sapwood_testing.models.hub_server import HubServer, Repo

FILES = {CONFIG: b'{"peft_type": "LORA"}', WEIGHTS: b"weights"}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SAPWOOD_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def written(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def refusal(path: str) -> str:
    with pytest.raises(ConfigError) as caught:
        find_adapter(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_is_taken_as_it_is_and_what_is_none_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "x", FILES)
    assert find_adapter(str(folder)) == folder
    assert f"holds no {WEIGHTS}" in refusal(str(written(tmp_path / "y", {CONFIG: b"{}"})))
    assert "neither a folder" in refusal(str(tmp_path / "nothing"))
    for nobodys in ("~nobody-of-this-name/x", "~a\0b", "a\0b", "\0"):
        assert "neither a folder" in refusal(nobodys)
    (tmp_path / "file.bin").write_bytes(b"")
    assert "neither a folder" in refusal(str(tmp_path / "file.bin"))
    gguf = tmp_path / "a.gguf"
    gguf.write_bytes(b"GGUF")
    assert find_adapter(str(gguf)) == gguf


def test_a_folder_at_a_url_is_fetched_once_and_again_when_it_has_changed(tmp_path: Path, home: Path) -> None:
    far = written(tmp_path / "far" / "x", FILES | {"optimizer.pt": b"not wanted"})
    first = find_adapter(f"file://{far}")
    assert {each.name: each.read_bytes() for each in first.iterdir()} == FILES
    assert first.is_relative_to(home) and first.name == "x"
    assert find_adapter(f"file://{far}/") == first
    (far / WEIGHTS).write_bytes(b"other weights")
    second = find_adapter(f"file://{far}")
    assert second != first and (second / WEIGHTS).read_bytes() == b"other weights"
    (far / CONFIG).unlink()
    assert "nothing lies there" in refusal(f"file://{far}")
    assert (find_adapter(f"file://{far}", may_fetch=False) / WEIGHTS).read_bytes() == b"other weights"


def test_a_full_disk_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    far = written(tmp_path / "far" / "x", FILES)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 3})())
    assert "MB are free" in refusal(f"file://{far}")


def test_adapters_of_the_hub_are_fetched_and_models_are_none(hub_server: HubServer, tmp_path: Path) -> None:
    hub_server.repos["someone/adapter"] = Repo()
    hub_server.repos["someone/adapter"].commit(FILES | {"training_args.bin": b"not wanted"})
    found = Hub(hub_server.url, tmp_path / "cache").find_files("someone/adapter", (CONFIG, WEIGHTS))
    assert {each.name: each.read_bytes() for each in found.iterdir()} == FILES
    with pytest.raises(ConfigError, match=f"has no {CONFIG}"):
        Hub(hub_server.url, tmp_path / "cache").find_files("someone/tiny", (CONFIG, WEIGHTS))
