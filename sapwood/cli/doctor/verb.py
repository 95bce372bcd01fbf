"""`sapwood doctor`: its flags and its answer."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from sapwood.cli.doctor.accelerator import examine_accelerators
from sapwood.cli.doctor.finding import Finding
from sapwood.cli.doctor.machine import examine_cores, examine_disks, examine_files, examine_memory
from sapwood.cli.doctor.network import examine_hub, examine_ports
from sapwood.cli.doctor.software import examine_packages, examine_protos, examine_python
from sapwood.cli.errors import FAILED

_DESCRIPTION = """\
Looks at this machine and says what Sapwood finds on it, what is missing for what, and what mends that. Changes nothing.
"""
_EXIT_CODES = "exit codes: 0 `sapwood up` has what it needs; 1 something that it needs is missing; 2 wrong usage"


def configure(verbs: Any) -> None:
    """Adds the verb to the parser."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        "doctor", help="say what this machine has and what is missing", description=_DESCRIPTION, epilog=_EXIT_CODES
    )
    parser.add_argument(
        "--json", action="store_true", help="print a JSON list: name, state, found, mend of each finding"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Examines the machine and prints what is found, each finding as soon as it is there; returns the exit code."""
    findings: list[Finding] = []
    for finding in _examine():
        findings.append(finding)
        if not arguments.json:
            mend = f"\n{'':27}-> {finding.mend}" if finding.mend else ""
            print(f"{finding.state:<8}{finding.name:<19}{finding.found}{mend}", flush=True)
    missing = [finding.name for finding in findings if finding.state == "missing"]
    if arguments.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1))
    else:
        print(f"\nmissing for `sapwood up`: {', '.join(missing)}" if missing else "\n`sapwood up` has what it needs")
    return FAILED if missing else 0


def _examine() -> Iterator[Finding]:
    yield examine_python()
    yield from examine_packages()
    yield examine_protos()
    yield from examine_accelerators()
    yield examine_cores()
    yield examine_memory()
    yield from examine_files()
    yield from examine_disks()
    yield examine_ports()
    yield examine_hub()
