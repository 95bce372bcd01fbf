from __future__ import annotations

import pytest


@pytest.fixture(params=["sapwood", "grpcio"])
def implementation(request: pytest.FixtureRequest) -> str:
    """Either server: what follows holds for both."""
    return request.param
