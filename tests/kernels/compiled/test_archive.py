"""Archives of compiled kernels: what Triton's own cache finds after they have moved, and what does not fit or is damaged."""

from __future__ import annotations

import io
import json
import tarfile
import threading
from pathlib import Path

import pytest

from sapwood_kernels.compiled import archive
from sapwood_kernels.compiled.early import EarlyBuild

FACTS = {"compute capability": "9.0", "torch": "2.11"}


@pytest.fixture
def built(tmp_path: Path) -> tuple[Path, Path]:
    """Triton's cache and FlashInfer's folder, with a kernel of each; and one of Triton's that is not finished."""
    triton = tmp_path / "triton"
    kernel = triton / "KEY"
    kernel.mkdir(parents=True)
    (kernel / "_k.cubin").write_bytes(b"code")
    (kernel / "_k.json").write_text("{}")
    children = {name: str(kernel / name) for name in ("_k.cubin", "_k.json")}
    (kernel / "__grp___k.json").write_text(json.dumps({"child_paths": children}))
    (kernel / "lock").touch()
    (triton / "HALF").mkdir()
    (triton / "HALF" / "_h.ttir").touch()
    (triton / "sapwood-known").touch()
    (triton / "LAUNCHER").mkdir()
    (triton / "LAUNCHER" / "launcher.so").write_bytes(b"so")
    library = tmp_path / "ops" / "prefill_128" / "prefill_128.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"library")
    (library.parent / "prefill_128.o").touch()
    return triton, tmp_path / "ops"


def test_what_is_packed_is_found_elsewhere(tmp_path: Path, built: tuple[Path, Path]):
    file = tmp_path / "sm90.tgz"
    assert archive.pack(file, FACTS, *built) == (2, 1)
    assert archive.read_facts(file) == FACTS
    triton, libraries = tmp_path / "elsewhere" / "triton", tmp_path / "elsewhere" / "flashinfer"
    assert archive.unpack(file, triton, libraries) == (2, 1)
    assert (libraries / "prefill_128" / "prefill_128.so").read_bytes() == b"library"
    assert sorted(each.name for each in triton.iterdir()) == ["KEY", "LAUNCHER", "sapwood-known"]
    group = json.loads((triton / "KEY" / "__grp___k.json").read_text())
    assert {name: Path(path).read_bytes() for name, path in group["child_paths"].items()} == {
        "_k.cubin": b"code", "_k.json": b"{}",
    }  # fmt: skip
    assert all(path.startswith(str(triton)) for path in group["child_paths"].values())


def test_tritons_cache_finds_a_kernel_that_was_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cache = pytest.importorskip("triton.runtime.cache", reason="Triton is not installed")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "here"))
    manager = cache.get_cache_manager("ab" * 8)
    manager.put_group("k.json", {"k.cubin": manager.put(b"code", "k.cubin")})
    file = tmp_path / "kernels.tgz"
    assert archive.pack(file, FACTS, tmp_path / "here", tmp_path / "none") == (1, 0)
    (tmp_path / "here").rename(tmp_path / "gone")
    archive.unpack(file, tmp_path / "there", tmp_path / "libraries")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "there"))
    found = cache.get_cache_manager("ab" * 8).get_group("k.json")
    assert found is not None and Path(found["k.cubin"]).read_bytes() == b"code"


def test_what_is_there_stays_and_what_is_half_there_is_completed(tmp_path: Path, built: tuple[Path, Path]):
    file = tmp_path / "sm90.tgz"
    archive.pack(file, FACTS, *built)
    triton, libraries = tmp_path / "t", tmp_path / "f"
    (triton / "KEY").mkdir(parents=True)
    (triton / "KEY" / "_k.cubin").write_bytes(b"half")
    (triton / "sapwood-known").touch()
    (triton / "LAUNCHER").mkdir()
    (triton / "LAUNCHER" / "launcher.so").write_bytes(b"own")
    assert archive.unpack(file, triton, libraries) == (1, 1)
    assert (triton / "KEY" / "_k.cubin").read_bytes() == b"code"
    assert (triton / "LAUNCHER" / "launcher.so").read_bytes() == b"own"
    assert archive.unpack(file, triton, libraries) == (0, 0)
    assert not list(triton.glob(".*"))


def test_what_differs_is_named():
    machine = {"compute capability": "8.0", "torch": "2.11", "triton": "3.6"}
    assert archive.differences(FACTS, machine) == ["compute capability 9.0, here 8.0", "triton none, here 3.6"]
    assert archive.differences(FACTS, FACTS) == []
    assert archive.machine_facts((9, 0), "13.0").items() >= {"compute capability": "9.0", "CUDA": "13.0"}.items()


@pytest.mark.parametrize("content", [b"", b"no archive", None])
def test_what_is_no_archive_is_refused_by_name(tmp_path: Path, content: bytes | None):
    file = tmp_path / "bad.tgz"
    if content is None:
        with tarfile.open(file, "w:gz") as tar:
            tar.add(__file__, "other.py")
    else:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=r"bad\.tgz"):
        archive.read_facts(file)


def test_a_damaged_archive_is_refused_and_leaves_nothing(tmp_path: Path, built: tuple[Path, Path]):
    file = tmp_path / "cut.tgz"
    archive.pack(file, FACTS, *built)
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"cut\.tgz: cannot be unpacked"):
        archive.unpack(file, tmp_path / "t", tmp_path / "f")
    assert not list((tmp_path / "t").iterdir())


def test_what_is_waited_for_is_told_and_a_failed_compiler_quoted():
    told: list[str] = []
    go_on = threading.Event()
    build = EarlyBuild(["fa3 for heads of 128"], lambda: go_on.wait(60) and None)

    def tell(text: str) -> None:
        told.append(text)
        go_on.set()

    build.wait(tell, every=0.01)
    assert told[0].startswith("waiting for FlashInfer's compiler: fa3 for heads of 128; ")

    def fail() -> None:
        raise RuntimeError("nvcc is not there")

    with pytest.raises(RuntimeError, match="nvcc is not there"):
        EarlyBuild([], fail).wait(told.append)


def test_a_file_that_leads_out_of_the_archive_is_refused(tmp_path):
    bad = tmp_path / "bad.tgz"
    with tarfile.open(bad, "w:gz") as tar:
        member = tarfile.TarInfo("triton/../../out")
        member.size = 1
        tar.addfile(member, io.BytesIO(b"x"))
    with pytest.raises(ValueError, match="leads out of it"):
        archive.unpack(bad, tmp_path / "a" / "triton", tmp_path / "a" / "flashinfer")
    assert not list(tmp_path.rglob("out"))
