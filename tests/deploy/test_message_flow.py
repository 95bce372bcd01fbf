"""Every name in the tables of docs/design/message-flow.md can be imported."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs/design/message-flow.md"
NAMES = sorted(set(re.findall(r"`(sapwood_\w+(?:\.\w+)+)`", PAGE.read_text(encoding="utf-8"))))


def test_the_tables_name_the_parts_of_all_services() -> None:
    assert {name.split(".")[0] for name in NAMES} == {
        "sapwood_router",
        "sapwood_text",
        "sapwood_tokenizer",
        "sapwood_worker",
    }
    assert len(NAMES) > 30


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_the_tables_can_be_imported(name: str) -> None:
    module, _, part = name.rpartition(".")
    assert hasattr(importlib.import_module(module), part)
