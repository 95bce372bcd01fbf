"""Looks at the ports of `sapwood up`, and whether the hub answers."""

from __future__ import annotations

import importlib.util
import os
import socket
import urllib.error
import urllib.request

from sapwood.cli.doctor.finding import Finding

_PORTS = {8000: "HTTP", 50051: "gRPC", 50052: "tokenizer", 50061: "worker 0", 50062: "worker 1"}
_HUB_SECONDS = 5.0


def examine_ports(ports: dict[int, str] | None = None) -> Finding:
    """Whether the ports that `sapwood up` takes unless told otherwise are free.

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
