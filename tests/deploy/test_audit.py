"""What `make audit` makes of pip-audit's answers: what was found is never hidden by what could not be looked up."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

verdict = runpy.run_path(str(Path(__file__).resolve().parents[1] / "audit.py"), run_name="audit")["verdict"]
BAD = {"name": "bad", "version": "1.0", "vulns": [{"id": "CVE-1", "fix_versions": ["1.1"]}]}
GOOD = {"name": "good", "version": "1.0", "vulns": []}
UNKNOWN = [{"name": f"own{number}", "skip_reason": "not on PyPI, could not be audited"} for number in range(50)]


@pytest.mark.parametrize(
    ("packages", "code", "said"),
    [
        ([GOOD], 0, "1 packages checked, 0 not, 0 vulnerabilities"),
        ([GOOD, BAD], 1, "VULNERABLE bad 1.0: CVE-1 (fixed in: 1.1)"),
        ([BAD, *UNKNOWN], 1, "VULNERABLE bad 1.0: CVE-1"),
        ([GOOD, *UNKNOWN], 0, "1 packages checked, 50 not"),
        (UNKNOWN, 0, "audit SKIPPED"),
    ],
)
def test_a_vulnerability_fails(packages: list[Any], code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert verdict(json.dumps({"dependencies": packages}), "") == code
    assert said in capsys.readouterr().out


def test_only_an_unreachable_database_is_an_excuse(capsys: pytest.CaptureFixture[str]) -> None:
    assert verdict("", "requests.exceptions.ConnectionError: no route") == 0
    assert "audit SKIPPED" in capsys.readouterr().out
    assert verdict("", "No module named pip_audit") == 1
