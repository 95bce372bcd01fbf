"""What the wheel says it runs on, and the pages that it carries."""

from __future__ import annotations

import runpy
import sysconfig
from pathlib import Path

import pytest

from sapwood.cli.main import main

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("contents", "platform"),
    [
        ([b"\0GLIBC_2.2.5\0GLIBC_2.27\0", b"GLIBC_2.9"], "manylinux_2_27_x86_64"),
        ([b"GLIBC_2.2.5"], "manylinux_2_17_x86_64"),
        ([b"no glibc, as on Alpine"], "linux_x86_64"),
    ],
)
def test_a_wheel_is_for_the_youngest_glibc_that_its_libraries_call(
    contents: list[bytes], platform: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_platform", lambda: "linux-x86_64")
    libraries = []
    for number, content in enumerate(contents):
        libraries.append(tmp_path / f"{number}.so")
        libraries[-1].write_bytes(content)
    assert runpy.run_path(str(ROOT / "hatch_build.py"))["platform_of"](libraries) == platform


def test_a_page_that_a_message_names_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs", "docs/models.md"]) == 0
    assert capsys.readouterr().out == (ROOT / "docs/models.md").read_text()
    assert main(["docs"]) == 0
    assert {"models", "design/public-api"} <= set(capsys.readouterr().out.split())
    assert main(["docs", "modles"]) == 2
    assert "did you mean models?" in capsys.readouterr().err
