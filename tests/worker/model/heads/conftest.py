"""A head that some of what it says is right of, for all tests of heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sapwood_testing.drafts.fitted_head import fit


@pytest.fixture(scope="session")
def trained(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The head, for the tiny Llama."""
    return fit(tiny_model("llama"), tmp_path_factory.mktemp("eagle") / "trained")
