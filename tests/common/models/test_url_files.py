"""Models at URLs: in memory, and in a stand-in for S3 that obstore asks over HTTP."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from sapwood_common.errors import ConfigError
from sapwood_common.models import model_files, url_files
from sapwood_common.models.url_files import UrlModels
from sapwood_testing.worker.storage.object_store import ObjectStoreServer

from .conftest import DESCRIPTION, OTHERS, WEIGHTS

EVERYTHING = DESCRIPTION | WEIGHTS | OTHERS


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStoreServer]:
    """An S3 with the model at ``s3://bucket/models/tiny``."""
    server = ObjectStoreServer()
    server.start()
    server.objects = {f"bucket/models/tiny/{name}": content for name, content in EVERYTHING.items()}
    server.objects["bucket/models/tiny-other/config.json"] = b"another model"
    for name, value in (
        ("AWS_ENDPOINT_URL", server.url),
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_REGION", "here"),
    ):
        monkeypatch.setenv(name, value)
    yield server
    server.stop()


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def refusal(models: UrlModels, url: str) -> str:
    with pytest.raises(ConfigError) as caught:
        models.find(url)
    said = str(caught.value)
    assert "\n" not in said
    assert said.startswith("--model: ")
    return said


def test_a_model_in_s3_is_fetched_once_and_by_its_name(bucket: ObjectStoreServer, tmp_path: Path) -> None:
    models = UrlModels(tmp_path)
    told: list[tuple[str, int, int]] = []
    found = models.find("s3://bucket/models/tiny", weights=False)
    assert files_in(found) == DESCRIPTION
    assert models.find("s3://bucket/models/tiny/", progress=lambda *step: told.append(step)) == found
    assert found.name == "tiny"
    assert files_in(found) == DESCRIPTION | WEIGHTS
    assert told[-1] == ("fetching s3://bucket/models/tiny", 6_000_000, 6_000_000)
    bucket.sent.clear()
    assert models.find("s3://bucket/models/tiny") == found
    assert [name for name in bucket.sent if not name.endswith("index.json")] == []
    bucket.failing = True
    assert models.find("s3://bucket/models/tiny", may_fetch=False) == found
    assert [url for url, _ in models.known()] == ["s3://bucket/models/tiny"]


def test_another_content_is_another_folder(bucket: ObjectStoreServer, tmp_path: Path) -> None:
    models = UrlModels(tmp_path)
    first = models.find("s3://bucket/models/tiny")
    name = next(iter(WEIGHTS))
    bucket.objects[f"bucket/models/tiny/{name}"] = b"9" * len(WEIGHTS[name])
    second = models.find("s3://bucket/models/tiny")
    assert second != first
    assert (first / name).read_bytes() == WEIGHTS[name]
    assert (second / name).read_bytes() == b"9" * len(WEIGHTS[name])
    assert models.find("s3://bucket/models/tiny", may_fetch=False) == second


def test_what_was_fetched_of_a_file_is_not_fetched_again(bucket: ObjectStoreServer, tmp_path: Path) -> None:
    name, content = "big.gguf", bytes(range(256)) * 100_000
    bucket.objects[f"bucket/{name}"] = content

    def stop(text: str, done: int, total: int) -> None:
        if done < total:
            raise KeyboardInterrupt

    models = UrlModels(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        models.find(f"s3://bucket/{name}", progress=stop)
    (partial,) = tmp_path.glob("*/big.gguf.partial")
    kept = partial.stat().st_size
    assert 0 < kept < len(content)
    bucket.sent.clear()
    path = models.find(f"s3://bucket/{name}")
    assert path.read_bytes() == content
    assert bucket.sent[f"bucket/{name}"] == len(content) - kept
    assert not partial.exists()


def test_any_file_system_of_fsspec_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe({f"/kept/tiny/{name}": content for name, content in EVERYTHING.items()})
    memory.pipe("/kept/tiny/../../outside_Pooling/config.json", b"{}")
    assert any("outside" in name for name in memory.find("/kept/tiny")), "it is offered, and left out below"
    (tmp_path / "mounted").mkdir()
    (tmp_path / "mounted" / "x.gguf").write_bytes(b"GGUF")
    monkeypatch.setenv("SAPWOOD_HOME", str(tmp_path / "home"))
    try:
        pinned = model_files.pin_model("memory://kept/tiny")
    finally:
        memory.rm("/kept", recursive=True)
    assert files_in(pinned.path) == DESCRIPTION | WEIGHTS
    assert pinned.settings == {"model": str(pinned.path)}
    assert model_files.model_name("memory://kept/tiny") == model_files.model_name(pinned.model) == "tiny"
    url = f"file://{tmp_path}/mounted/x.gguf"
    assert model_files.resolve_model(url).read_bytes() == b"GGUF"
    assert model_files.model_name(url) == "x"


@pytest.mark.parametrize(
    ("said", "refused"),
    [
        ("after 1.540396ms - Server returned non-2xx status code: 400 Bad Request", False),
        ("GET http://127.0.0.1:44030/bucket - Server returned non-2xx status code: 500 Internal Server Error", False),
        ("after 1.5ms - Server returned non-2xx status code: 403 Forbidden: ", True),
        ("The operation lacked valid authentication credentials for path x: Unauthenticated", True),
    ],
)
def test_keys_are_named_only_where_the_store_refuses_them(said: str, refused: bool, tmp_path: Path) -> None:
    told = url_files._explain(OSError(said), "s3://bucket/x", tmp_path)
    assert told.startswith("it may not be read: check the keys" if refused else "it cannot be read: ")


def test_what_cannot_be_fetched_is_one_line_that_says_what_to_do(
    bucket: ObjectStoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = UrlModels(tmp_path)
    assert "s3://bucket/nothing.gguf: nothing lies there" in refusal(models, "s3://bucket/nothing.gguf")
    assert "s3://bucket/models holds no config.json" in refusal(models, "s3://bucket/models")
    del bucket.objects[f"bucket/models/tiny/{next(iter(WEIGHTS))}"]
    assert "weights are read from safetensors or a .gguf file" in refusal(models, "s3://bucket/models/tiny")
    bucket.objects["bucket/models/tiny/model.safetensors.index.json"] = b"no index"
    assert "model.safetensors.index.json: cannot be read" in refusal(models, "s3://bucket/models/tiny")
    bucket.failing = True
    assert "s3://bucket/models/tiny: it cannot be read: " in refusal(models, "s3://bucket/models/tiny")
    assert "Protocol not known: nonsense" in refusal(models, "nonsense://x/y")
    with pytest.raises(ConfigError, match=r"is not under .*; fetch it: sapwood model fetch s3://bucket/models/tiny"):
        models.find("s3://bucket/models/tiny", may_fetch=False)
    monkeypatch.setitem(sys.modules, "obstore.fsspec", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3")  # it is known by now
    assert refusal(models, "s3://bucket/x") == "--model: s3://bucket/x: needs: pip install 'sapwood[s3]'"


def test_all_gguf_files_of_a_model_in_several_are_fetched(bucket: ObjectStoreServer, tmp_path: Path) -> None:
    parts = {f"a-0000{number}-of-00002.gguf": bytes([number]) * 5 for number in (1, 2)}
    bucket.objects |= {f"bucket/models/{name}": content for name, content in parts.items()}
    found = UrlModels(tmp_path).find("s3://bucket/models/a-00001-of-00002.gguf")
    assert found.name == "a-00001-of-00002.gguf"
    assert {name: each for name, each in files_in(found.parent).items() if name.endswith(".gguf")} == parts
    assert UrlModels(tmp_path).find("s3://bucket/models/a-00002-of-00002.gguf", may_fetch=False) == found
