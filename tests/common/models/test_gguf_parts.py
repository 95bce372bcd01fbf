"""Names of GGUF files that are parts of a model."""

from __future__ import annotations

import pytest

from sapwood_common.models.gguf_parts import part_names, without_part


@pytest.mark.parametrize("name", ["a/x-00001-of-00003.gguf", "a/x-00002-of-00003.gguf"])
def test_any_part_names_all(name: str) -> None:
    assert part_names(name) == [f"a/x-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    assert without_part(name) == "a/x"


@pytest.mark.parametrize("name", ["x.gguf", "x-1-of-3.gguf", "x-00001-of-00000.gguf", "x-00001-of-00003.bin"])
def test_any_other_name_is_the_only_one(name: str) -> None:
    assert part_names(name) == [name]
