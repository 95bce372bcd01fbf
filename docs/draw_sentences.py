"""Draws sentences at random from docstrings, comments, help texts, protos and docs, for design/reading-test.md.

python docs/draw_sentences.py SEED [N]    prints N sentences (40), each with its file and line; a seed draws the same ones again
"""

from __future__ import annotations

import ast
import io
import random
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("protos", "sapwood", "services", "kernels", "docs", "README.md", "CONTRIBUTING.md", "GLOSSARY.md")
FEWEST_WORDS = 6
_HELP = ("help", "description", "text")
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z`\"'\[(])")
_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Yields):$")
_FIELD = re.compile(r"^`{0,2}[*\w., ]+`{0,2}: ")

Text = tuple[int, str]
"""The line at which a text begins, and the text."""


def main() -> None:
    """Prints the draw."""
    seed, count = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 40
    for place, sentence in draw(seed, count):
        print(f"{place}\n    {sentence}")


def draw(seed: int, count: int) -> list[tuple[str, str]]:
    """Sentences, each with its place ``file:line``."""
    return random.Random(seed).sample(sorted(set(sentences())), count)


def sentences() -> Iterator[tuple[str, str]]:
    """All sentences of six words and more, each with its place."""
    listed = subprocess.run(["git", "ls-files", *SOURCES], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.split():
        path = ROOT / name
        readers = {".py": python_texts, ".proto": proto_texts, ".md": page_texts}
        if path.suffix not in readers or not path.exists():
            continue
        for line, text in readers[path.suffix](path.read_text(encoding="utf-8")):
            for sentence in _SENTENCE.split(" ".join(text.split())):
                if len(sentence.split()) >= FEWEST_WORDS:
                    yield f"{name}:{line}", sentence


def python_texts(source: str) -> Iterator[Text]:
    """Docstrings, comments and help texts of a Python file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from _paragraphs(node.lineno, node.value.value)
        elif isinstance(node, ast.keyword) and node.arg in _HELP and isinstance(node.value, ast.Constant):
            yield node.value.lineno, str(node.value.value)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    yield from _joined([(each.start[0], each.string.lstrip("# ")) for each in tokens if each.type == tokenize.COMMENT])


def proto_texts(source: str) -> Iterator[Text]:
    """Comments of a proto."""
    lines = enumerate(source.split("\n"), 1)
    yield from _joined([(number, line.strip().lstrip("/ ")) for number, line in lines if line.strip().startswith("//")])


def page_texts(source: str) -> Iterator[Text]:
    """Paragraphs and items of a page; no headings, tables and code."""
    text = re.sub(r"^```.*?^```$", lambda code: "\n" * code[0].count("\n"), source, flags=re.M | re.S)
    lines = [("" if re.match(r"[|#]", line) else re.sub(r"^\s*([-*]|\d+\.) ", "\n", line)) for line in text.split("\n")]
    found: list[str] = []
    start = 1
    for number, line in enumerate([*lines, ""], 1):
        if not line.strip() or line.startswith("\n"):
            if found:
                yield start, " ".join(found)
            found, start = [], number
        if line.strip():
            if not found:
                start = number
            found.append(line.strip())


def _paragraphs(line: int, text: str) -> Iterator[Text]:
    found: list[str] = []
    for each in [*text.split("\n"), ""]:
        stripped = each.strip()
        if not stripped or _SECTION.match(stripped) or _FIELD.match(stripped) or stripped.startswith(("- ", "=", "* ")):
            if found:
                yield line, " ".join(found)
            found = []
        if stripped and not _SECTION.match(stripped) and not stripped.startswith("="):
            found.append(stripped)


def _joined(comments: list[Text]) -> Iterator[Text]:
    found: list[str] = []
    start = last = 0
    for line, text in [*comments, (sys.maxsize, "")]:
        if line != last + 1 and found:
            yield start, " ".join(found)
            found = []
        if not found:
            start = line
        found.append(text)
        last = line


if __name__ == "__main__":
    main()
