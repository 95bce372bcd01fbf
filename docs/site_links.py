"""Makes a site of the repository's Markdown: a hook of mkdocs, which ``mkdocs.yml`` names.

Pages are the files of ``docs/`` and those of ``FURTHER``. A page links to a file that is no page by a copy of it below
``source/``, and to a folder by a list of its files. Links are written as GitHub reads them; here they become the site's.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parent.parent
FURTHER = {
    "README.md": "index.md",
    "GLOSSARY.md": "project/glossary.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "SECURITY.md": "project/security.md",
    "RELEASING.md": "project/releasing.md",
    "benchmarks/results/README.md": "reference/results.md",
    "services/common/sapwood_net/README.md": "reference/net.md",
    "services/common/sapwood_net/http2/README.md": "reference/http2.md",
}
"""Markdown outside of ``docs/`` that has a page, by its path in the repository."""

_PATHS = {page: path for path, page in FURTHER.items()}
_SOURCE = "source/"
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)([^)#\s]+)(#[^)\s]*)?(?=\))")
_FENCE = re.compile(r"(^```.*?^```$)", re.M | re.S)


def place_of(path: str) -> str:
    """Where a file or folder of the repository stands on the site."""
    if (ROOT / path).is_dir():
        return f"{_SOURCE}{path}/index.md"
    return FURTHER.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else _SOURCE + path)


def rewritten(text: str, path: str) -> str:
    """The text of a Markdown file with the links that the site has.

    Raises:
        FileNotFoundError: A link names a file that the repository does not have.
    """
    here = posixpath.dirname(place_of(path)) or "."

    def replaced(match: re.Match[str]) -> str:
        target = _target(path, match[1])
        if not (ROOT / target).exists():
            raise FileNotFoundError(f"{path} links to {match[1]}, which is not there")
        return posixpath.relpath(place_of(target), here) + (match[2] or "")

    parts = _FENCE.split(text)
    return "".join(part if part.startswith("```") else _LINK.sub(replaced, part) for part in parts)


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages outside of ``docs/``, and what pages link to and is no page."""
    for path, page in FURTHER.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    linked = {target for file in files.documentation_pages() for target in _targets(_path_of(file.src_uri))}
    for target in sorted(linked):
        place = place_of(target)
        if not place.startswith(_SOURCE):
            continue
        if (ROOT / target).is_dir():
            names = sorted(each.name for each in (ROOT / target).iterdir() if not each.name.startswith((".", "_")))
            text = "\n".join(
                [f"# {target}", "", "A folder of the repository:", "", *(f"- `{name}`" for name in names), ""]
            )
            files.append(File.generated(config, place, content=text, inclusion=InclusionLevel.NOT_IN_NAV))
        else:
            files.append(File.generated(config, place, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Gives a page the site's links."""
    page_uri: str = page.file.src_uri
    return markdown if page_uri.startswith(_SOURCE) else rewritten(markdown, _path_of(page_uri))


def _path_of(page: str) -> str:
    return _PATHS.get(page, f"docs/{page}")


def _targets(path: str) -> Iterator[str]:
    for match in _LINK.finditer(_FENCE.sub("", (ROOT / path).read_text())):
        yield _target(path, match[1])


def _target(path: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
