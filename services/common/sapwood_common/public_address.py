"""Which addresses a service may ask because a client said so: those that the client could ask as well."""

from __future__ import annotations

import ipaddress


def is_public(address: str) -> bool:
    """Whether an address is one of the whole internet: none of this host, of a private network, or of a cloud's own services."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour or (found.teredo[1] if found.teredo else None)
        if inner is not None:
            return is_public(str(inner)) and not found.is_loopback
        if found in _NAT64:
            return is_public(str(ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)))
        if found.is_site_local:
            return False
    if any(found in network for network in _SPECIAL if network.version == found.version):
        return False
    return found.is_global and not (found.is_multicast or found.is_reserved or found.is_unspecified)


_SPECIAL = tuple(map(ipaddress.ip_network, ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32", "3fff::/20")))
"""Of protocols, of Azure's own services, and of examples, which Python's releases do not all know."""
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
