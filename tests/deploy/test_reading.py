"""The draw of sentences for docs/design/reading-test.md."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "draw_sentences.py"


def _script() -> Any:
    spec = importlib.util.spec_from_file_location("draw_sentences", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_docstrings_comments_and_help_texts_of_python_are_found() -> None:
    source = '"""A module.\n\nSecond paragraph."""\nx = f(help="Help text.")  # a comment\n'
    assert [text for _, text in _script().python_texts(source)] == [
        "A module.",
        "Second paragraph.",
        "Help text.",
        "a comment",
    ]


def test_paragraphs_and_items_of_a_page_are_found_without_code_and_tables() -> None:
    page = "# Title\n\nOne\nparagraph.\n\n- an item\n\n| a | table |\n\n```sh\ncode\n```\n"
    assert [text for _, text in _script().page_texts(page)] == ["One paragraph.", "an item"]


def test_a_seed_draws_the_same_sentences_again() -> None:
    script = _script()
    script.sentences = lambda: [("file:1", f"Sentence {number}.") for number in range(100)]
    drawn = script.draw(3, 5)
    assert len(drawn) == 5 and drawn == script.draw(3, 5) != script.draw(4, 5)
