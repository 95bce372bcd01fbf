"""Names under which a server may be asked: the owner of another name can have it point to this machine, and a browser then takes
his page and the server for one (DNS rebinding)."""

from __future__ import annotations

import re
from ipaddress import ip_address

_LOCAL = "localhost"


def is_own_machine(host: str) -> bool:
    """Whether a Host header, with or without port, is a name that no DNS owner can redirect: an IP address or localhost."""
    name = re.sub(r":\d*$", "", host).strip("[]").lower()
    return _is_local(name) or _is_address(name)


def listens_on_loopback(host: str) -> bool:
    """Whether what listens on this address or name is reached from this machine alone."""
    name = host.strip("[]").lower()
    return _is_local(name) or (_is_address(name) and ip_address(name).is_loopback)


def _is_local(name: str) -> bool:
    return name == _LOCAL or name.endswith(f".{_LOCAL}")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
