"""What docs/architecture.md and docs/development.md say of the source folders."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.containers.test_build import SECRETS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("service", ["router", "tokenizer", "worker"])
def test_a_services_own_folder_holds_rooms_and_nothing_else_but_its_start(service: str) -> None:
    folder = ROOT / "services" / service / f"sapwood_{service}"
    found = {path.name for path in folder.glob("*.py")} - {"settings.py"}  # what config.py is made of
    assert found == {"__init__.py", "__main__.py", "app.py", "config.py"}


def test_files_that_the_page_for_developers_names_exist() -> None:
    text = (ROOT / "docs/development.md").read_text(encoding="utf-8")
    named = {name for name in re.findall(r"`([a-z0-9_/.]+\.(?:py|proto))`", text) if "/" in name}
    assert len(named) > 10
    folders = ("services", "sapwood", "sapwood_testing", "kernels", "protos", "tests")
    known = [path.as_posix() for folder in folders for path in (ROOT / folder).rglob("*.*")]
    assert {name for name in named if not any(path.endswith(f"/{name}") for path in known)} == set()


def test_no_source_looks_like_a_secret() -> None:
    """The images' test looks for secrets with the same words."""
    files = [path for folder in ("services", "sapwood", "kernels") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 500
    found = [path.name for path in files for secret in SECRETS if re.search(secret, path.read_text(encoding="utf-8"))]
    assert found == []
