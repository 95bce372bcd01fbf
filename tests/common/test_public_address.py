"""Addresses that a client may have a service ask."""

from __future__ import annotations

import pytest

from sapwood_common.public_address import is_public


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True), ("2606:4700:4700::1111", True), ("127.0.0.1", False), ("10.1.2.3", False),
        ("172.16.0.1", False), ("192.168.1.1", False), ("169.254.169.254", False), ("100.64.0.1", False),
        ("0.0.0.0", False), ("224.0.0.1", False), ("255.255.255.255", False), ("192.0.2.1", False), ("::1", False),
        ("::", False), ("fe80::1%eth0", False), ("fc00::1", False), ("fd00:ec2::254", False), ("ff02::1", False),
        ("::ffff:10.0.0.1", False), ("::ffff:127.0.0.1", False), ("2002:7f00:1::", False), ("64:ff9b::7f00:1", False),
        ("64:ff9b::a9fe:a9fe", False), ("2001:db8::1", False), ("fec0::1", False), ("192.0.0.8", False), ("168.63.129.16", False),
        ("::ffff:168.63.129.16", False), ("3fff::1", False), ("64:ff9b::a83f:8110", False),
    ],
)  # fmt: skip
def test_addresses_of_this_host_and_of_private_networks_are_not_public(address: str, public: bool) -> None:
    assert is_public(address) is public
