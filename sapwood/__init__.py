"""Sapwood: large language models served as a suite of gRPC microservices.

``sapwood.Engine`` and ``sapwood.AsyncEngine`` run a model in a program, ``sapwood.Server`` starts a cluster from Python,
``sapwood.client`` asks one. Importing this package imports none of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sapwood.embedded.async_engine import AsyncEngine
    from sapwood.embedded.engine import Engine
    from sapwood.embedded.server import Server

__all__ = ["AsyncEngine", "Engine", "Server"]

_MODULES = {
    "AsyncEngine": "sapwood.embedded.async_engine",
    "Engine": "sapwood.embedded.engine",
    "Server": "sapwood.embedded.server",
}


def __getattr__(name: str) -> Any:
    """Imports a class when it is first named: clients need nothing that the services need."""
    if name not in _MODULES:
        raise AttributeError(f"module 'sapwood' has no attribute {name!r}")
    try:
        return getattr(import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"sapwood.{name} needs the services: pip install 'sapwood[all]' ({error})", name=error.name
        ) from error
