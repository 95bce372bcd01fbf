"""Makes a site of the repository's Markdown: a hook of mkdocs, which ``mkdocs.yml`` names.

Pages are the files of ``docs/`` and those of ``FURTHER``. A page links to a file that is no page by a copy of it below
``source/``, and to a folder by its name only. Links are written as GitHub reads them; here they become the site's.
"""

from __future__ import annotations

import posixpath
import re
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

_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)([^)#\s]+)(#[^)\s]*)?(?=\))")
_FENCE = re.compile(r"(^```.*?^```$)", re.M | re.S)


def page_of(path: str) -> str | None:
    """The page of a Markdown file of the repository, relative to the site; None: it has none."""
    if path.startswith("docs/") and path.endswith(".md"):
        return path.removeprefix("docs/")
    return FURTHER.get(path)


def linked(text: str, path: str) -> list[str]:
    """The files of the repository that a Markdown file links to and that are no pages."""
    found = []
    for match in _LINK.finditer(_FENCE.sub("", text)):
        target = _target(path, match[1])
        if page_of(target) is None and (ROOT / target).is_file():
            found.append(target)
    return found


def rewritten(text: str, path: str) -> str:
    """The text of a Markdown file with the links that the site has.

    Raises:
        FileNotFoundError: A link names a file that the repository does not have.
    """
    here = posixpath.dirname(page_of(path) or "")

    def replaced(match: re.Match[str]) -> str:
        target, anchor = _target(path, match[1]), match[2] or ""
        if not (ROOT / target).exists():
            raise FileNotFoundError(f"{path} links to {match[1]}, which is not there")
        page = page_of(target)
        if page is not None:
            return posixpath.relpath(page, here or ".") + anchor
        if (ROOT / target).is_dir():
            return posixpath.relpath(f"source/{target}/index.md", here or ".")
        if target.startswith("docs/"):
            return posixpath.relpath(target.removeprefix("docs/"), here or ".")
        return posixpath.relpath(f"source/{target}", here or ".")

    parts = _FENCE.split(text)
    return "".join(part if part.startswith("```") else _LINK.sub(replaced, part) for part in parts)


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages outside of ``docs/``, and copies of the files that pages link to."""
    for path, page in FURTHER.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    sources = {page: path for path, page in FURTHER.items()}
    folders: set[str] = set()
    for file in files.documentation_pages():
        path = sources.get(file.src_uri, f"docs/{file.src_uri}")
        text = (ROOT / path).read_text()
        for target in linked(text, path):
            if not target.startswith("docs/") and files.get_file_from_path(f"source/{target}") is None:
                files.append(File.generated(config, f"source/{target}", abs_src_path=str(ROOT / target)))
        folders |= {
            target
            for target in (_target(path, match[1]) for match in _LINK.finditer(_FENCE.sub("", text)))
            if (ROOT / target).is_dir()
        }
    for folder in sorted(folders):
        names = sorted(each.name for each in (ROOT / folder).iterdir() if not each.name.startswith((".", "_")))
        listing = "\n".join(
            [f"# {folder}", "", "A folder of the repository. It has:", "", *(f"- `{name}`" for name in names)]
        )
        page = f"source/{folder}/index.md"
        files.append(File.generated(config, page, content=listing + "\n", inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Gives a page the site's links."""
    sources = {made: path for path, made in FURTHER.items()}
    if page.file.src_uri.startswith("source/"):
        return markdown
    return rewritten(markdown, sources.get(page.file.src_uri, f"docs/{page.file.src_uri}"))


def _target(path: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
