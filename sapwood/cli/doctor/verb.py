"""`sapwood doctor`: its flags and its answer."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from sapwood.cli.doctor.accelerator import examine_accelerators
from sapwood.cli.doctor.finding import Finding
from sapwood.cli.doctor.machine import examine_cores, examine_disks, examine_files, examine_memory
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


_PORTS = {8000: "HTTP", 50051: "gRPC", 50052: "tokenizer", 50061: "worker 0", 50062: "worker 1"}
_HUB_SECONDS = 5.0


def examine_ports(ports: dict[int, str] | None = None) -> Finding:
    """Whether the ports that `sapwood up` takes by default are free.

    Args:
        ports: Their uses, by port; None: those.
    """
    taken = {port: use for port, use in (_PORTS if ports is None else ports).items() if not _is_free(port)}
    if taken:
        named = ", ".join(f"{port} ({use})" for port, use in taken.items())
        return Finding("ports", "note", f"taken: {named}", "sapwood up --ports auto")
    return Finding("ports", "ok", f"free: {', '.join(map(str, _PORTS if ports is None else ports))}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def examine_hub() -> Finding:
    """Whether models can be fetched by their names; asks the hub once."""
    if importlib.util.find_spec("huggingface_hub") is None:
        return Finding("hub", "note", "its library is not installed", "pip install 'sapwood[models]'")
    from huggingface_hub import constants, get_token

    token = "with a token" if get_token() else "without a token: private and gated models need HF_TOKEN"
    if constants.is_offline_mode():
        cache = constants.HF_HUB_CACHE
        return Finding("hub", "note", f"offline mode: only what is in {cache} is served", "unset HF_HUB_OFFLINE")
    try:
        with urllib.request.urlopen(f"{constants.ENDPOINT}/api/models?limit=1", timeout=_HUB_SECONDS):
            pass
    except urllib.error.HTTPError:
        pass  # it answers
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        return Finding(
            "hub",
            "note",
            f"{constants.ENDPOINT} does not answer ({reason}): models by name have to be in the cache",
            "set HTTPS_PROXY or HF_ENDPOINT"
            if "HTTPS_PROXY" not in os.environ
            else "check HTTPS_PROXY and HF_ENDPOINT",
        )
    return Finding("hub", "ok", f"{constants.ENDPOINT} answers, {token}")
