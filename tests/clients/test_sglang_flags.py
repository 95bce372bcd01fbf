"""The table of SGLang's flags has all flags of the release that it names."""

from __future__ import annotations

import ast
import zipfile
from pathlib import Path
from typing import Any

import pytest

from sapwood.cli.flags_of_others import of_sglang
from sapwood_testing.models.packages import packaged_model

pytestmark = [pytest.mark.slow, pytest.mark.clients, pytest.mark.timeout(900)]
_FIELDS = "sglang/srt/arg_groups/fields/"


def names_in(source: str) -> set[str]:
    """The fields of a module's classes, as flags are spelt."""
    classes = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    fields = (node.target for each in classes for node in each.body if isinstance(node, ast.AnnAssign))
    return {each.id.replace("_", "-") for each in fields if isinstance(each, ast.Name) and each.id[0] != "_"}


def test_the_table_has_every_flag_of_the_release(tmp_path_factory: Any) -> None:
    def unpack(wheel: zipfile.ZipFile, folder: Path) -> Path:
        for name in wheel.namelist():
            if name.startswith(_FIELDS) and name.endswith(".py"):
                wheel.extract(name, folder)
        return folder / _FIELDS

    fields = packaged_model("sglang-fields", "sglang==0.5.23", unpack, tmp_path_factory.mktemp("sglang"))
    theirs = set().union(*(names_in(path.read_text()) for path in Path(fields).glob("*.py")))
    ours = {flag for row in of_sglang() for flag in row.flags}
    assert len(theirs) > 500
    assert (theirs - ours, ours - theirs) == (set(), set())
