"""What docs/design/public-api.md calls public is there, and it leaves out no group of entry points and no package."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import sapwood

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/design/public-api.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`([^`]+)`", PAGE)


def test_files_and_folders_that_the_page_names_exist() -> None:
    paths = [name for name in NAMED if re.fullmatch(r"[\w./-]+/[\w./-]+", name) and not name.startswith("/")]
    assert len(paths) > 5
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_modules_and_classes_that_the_page_names_can_be_imported() -> None:
    for name in ("client", "generation", "lang", "weights"):
        assert f"sapwood.{name}" in NAMED
        importlib.import_module(f"sapwood.{name}")
    classes = {name.removeprefix("sapwood.") for name in NAMED if re.fullmatch(r"sapwood\.[A-Z]\w+", name)}
    assert classes == set(sapwood.__all__)
    assert all(getattr(sapwood, name) for name in classes)


def test_the_page_names_every_group_of_entry_points() -> None:
    listed = {name for name in NAMED if re.fullmatch(r"sapwood\.[a-z_]+", name)} - {
        "sapwood.client",
        "sapwood.generation",
        "sapwood.lang",
        "sapwood.weights",
    }
    source = [path.read_text(encoding="utf-8") for path in (ROOT / "services").rglob("*.py")]
    constants = r"^(?:GROUP|[A-Z]+_(?:BACKENDS|METHODS|PROCESSORS|FAMILIES|RESOLVERS)) = \"(sapwood\.[a-z_]+)\""
    assert listed == {name for text in source for name in re.findall(constants, text, re.MULTILINE)}


def test_the_page_names_every_package_that_is_not_public() -> None:
    packages = [*ROOT.glob("services/*/sapwood_*"), *ROOT.glob("kernels/sapwood_*"), ROOT / "sapwood_testing"]
    names = {path.name for path in packages if (path / "__init__.py").exists()}
    assert names == {name for name in NAMED if re.fullmatch(r"sapwood_\w+", name)}
