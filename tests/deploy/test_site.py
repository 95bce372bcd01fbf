"""The documentation as a site: every link leads somewhere, and mkdocs builds it without a warning."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    assert "not included in the" not in built.stderr, "each page stands in the navigation of mkdocs.yml"
    return folder


def test_every_link_of_every_page_leads_to_a_file_of_the_site(site: Path) -> None:
    missing = []
    for page in site.rglob("*.html"):
        for link in re.findall(r'(?:href|src)="([^"]+)"', page.read_text()):
            target = link.partition("#")[0].partition("?")[0]
            if target and not re.match(r"[a-z]+:|//|/", target) and not (page.parent / target).exists():
                missing.append(f"{page.relative_to(site)}: {link}")
    assert not missing


def test_pages_ask_no_other_server_for_anything(site: Path) -> None:
    asked = {
        link
        for page in site.rglob("*.html")
        for link in re.findall(r'<(?:link|script|img)[^>]+(?:href|src)="(https?:[^"]+)"', page.read_text())
    }
    assert not asked


def test_a_link_to_a_missing_file_is_refused_by_name() -> None:
    spec = importlib.util.spec_from_file_location("site_links", ROOT / "docs" / "site_links.py")
    assert spec is not None and spec.loader is not None
    links = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(links)
    assert links.rewritten("[a](models.md#x)", "docs/python.md") == "[a](models.md#x)"
    assert links.rewritten("[a](../examples)", "docs/python.md") == "[a](source/examples/index.md)"
    with pytest.raises(FileNotFoundError, match=r"docs/python.md links to nowhere.md"):
        links.rewritten("[a](nowhere.md)", "docs/python.md")
