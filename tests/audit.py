"""`make audit`: pip-audit over this environment. A vulnerability fails it; what could not be looked up is named, and passes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

_MOST_NAMED = 20
_UNREACHABLE = (
    "ConnectionError",
    "Max retries exceeded",
    "ServiceError",
    "timed out",
    "Temporary failure in name resolution",
)


@dataclass
class Findings:
    """What pip-audit reports.

    Attributes:
        vulnerable: A line for each vulnerability.
        skipped: Packages that were not looked up, with the reason.
        checked: How many were.
    """

    vulnerable: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    checked: int = 0


def findings(report: dict[str, Any]) -> Findings:
    """Of pip-audit's JSON."""
    found = Findings()
    for package in report["dependencies"]:
        if "skip_reason" in package:
            found.skipped.append(f"{package['name']}: {package['skip_reason']}")
            continue
        found.checked += 1
        for item in package["vulns"]:
            fixed = ", ".join(item["fix_versions"]) or "nowhere yet"
            found.vulnerable.append(f"{package['name']} {package['version']}: {item['id']} (fixed in: {fixed})")
    return found


def verdict(output: str, errors: str) -> int:
    """Prints what was found; returns the exit code.

    Args:
        output: What pip-audit wrote to standard output: JSON, or nothing where it gave up.
        errors: What it wrote to standard error.
    """
    try:
        found = findings(json.loads(output))
    except ValueError:
        print(errors[-2000:])
        if not any(sign in errors for sign in _UNREACHABLE):
            return 1
        print("audit SKIPPED: the advisory database cannot be reached from here")
        return 0
    for line in found.vulnerable:
        print("VULNERABLE", line)
    for line in found.skipped[:_MOST_NAMED]:
        print("not audited:", line)
    print(f"audit: {found.checked} packages checked, {len(found.skipped)} not, {len(found.vulnerable)} vulnerabilities")
    if not found.checked:
        print("audit SKIPPED: the advisory database cannot be reached from here")
    return 1 if found.vulnerable else 0


def main() -> int:
    """Entry point."""
    command = [sys.executable, "-m", "pip_audit", "--local", "--skip-editable", "--progress-spinner", "off"]
    try:
        done = subprocess.run([*command, "--format", "json"], capture_output=True, text=True, timeout=300, check=False)
    except subprocess.TimeoutExpired:
        print("audit SKIPPED: the advisory database does not answer")
        return 0
    return verdict(done.stdout, done.stderr)


if __name__ == "__main__":
    sys.exit(main())
