"""The page on security names the methods that clients may call, and no others."""

from __future__ import annotations

import re
from pathlib import Path

from sapwood.v1 import router_pb2
from sapwood_router.edges.grpc.service import PUBLIC_METHODS

PAGE = Path(__file__).parents[4] / "docs" / "security.md"


def test_the_page_names_the_methods_for_clients() -> None:
    [said] = re.findall(r"serves everything but (.*?) and sessions only there", PAGE.read_text())
    methods = {each.rpartition("/")[2] for each in PUBLIC_METHODS}
    assert {*re.findall(r"`(\w+)`", said)} == {each for each in methods if not each.endswith("Session")}
    known = router_pb2.DESCRIPTOR.services_by_name["Router"].methods_by_name
    assert {each for each in methods if each.endswith("Session")} == {
        each for each in known if each.endswith("Session")
    }
