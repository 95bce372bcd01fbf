"""Which torch `make` installs: the one for CPUs, a tenth as large, where there is no GPU and its index answers."""

from __future__ import annotations

import http.server
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_GPU = sys.platform == "linux" and not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg")))
pytestmark = pytest.mark.skipif(not WITHOUT_GPU, reason="a Linux without a GPU is wanted")


@pytest.fixture
def indexes(tmp_path: Path) -> Iterator[str]:
    """The URL of two indexes: `all` with torch as PyPI has it, `cpu` with the build for CPUs."""
    for index, version in (("all", "2.13.0"), ("cpu", "2.13.0+cpu")):
        name = f"torch-{version}-py3-none-any.whl"
        folder = tmp_path / index / "torch"
        folder.mkdir(parents=True)
        with zipfile.ZipFile(folder / name, "w") as wheel:
            info = f"torch-{version}.dist-info"
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
            wheel.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr(f"{info}/RECORD", "")
        (folder / "index.html").write_text(f'<a href="{name.replace("+", "%2B")}">{name}</a>')
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def _flags(*variables: str) -> str:
    """What `make` has pip install first."""
    command = [
        "make",
        "-s",
        f"BIN={Path(sys.executable).parent}",
        *variables,
        "--eval=shown: ; @echo $(TORCH) $(for_cpu)",
        "shown",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "TORCH" and "proxy" not in name.lower()}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def test_without_a_gpu_the_build_for_cpus_is_taken(indexes: str, tmp_path: Path) -> None:
    flags = _flags(f"CPU_TORCH={indexes}/cpu")
    assert flags == f"torch==2.13.0 --extra-index-url {indexes}/cpu"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--isolated",
        "download",
        "--no-deps",
        "--no-cache-dir",
        "-q",
        "-d",
        str(tmp_path / "got"),
    ]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PIP_") and "proxy" not in name.lower()
    }
    environment["PIP_CONFIG_FILE"] = os.devnull
    subprocess.run([*pip, "--index-url", f"{indexes}/all", *flags.split()], env=environment, check=True)
    assert [file.name for file in (tmp_path / "got").iterdir()] == ["torch-2.13.0+cpu-py3-none-any.whl"]


def test_an_index_that_does_not_answer_is_left_out(free_port: int) -> None:
    assert _flags(f"CPU_TORCH=http://127.0.0.1:{free_port}/cpu") == "torch==2.13.0"


def test_a_torch_that_is_named_is_taken_as_it_is(indexes: str) -> None:
    assert _flags(f"CPU_TORCH={indexes}/cpu", "TORCH=torch==2.12.0") == "torch==2.12.0"
