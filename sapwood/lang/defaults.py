"""The backend of programs that name none, as SGLang's programs expect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sapwood.lang.backends.base import Backend


@dataclass
class GlobalConfig:
    """What holds for the whole process.

    Attributes:
        default_backend: Where programs run that name no backend.
    """

    default_backend: Backend | None = None


global_config = GlobalConfig()


def set_default_backend(backend: Backend) -> None:
    """Programs that name no backend run there."""
    global_config.default_backend = backend


def backend_or_default(backend: Backend | None) -> Backend:
    """The backend that is meant. Raises ValueError if there is none, and TypeError for what is no backend."""
    found = backend or global_config.default_backend
    if found is None:
        raise ValueError("give a backend, or set_default_backend(...) first")
    if not isinstance(found, Backend):
        raise TypeError(f"a backend is an object such as Sapwood('host:port'), not {found!r:.60}")
    return found


def flush_cache(backend: Backend | None = None) -> None:
    """Empties the server's cache of prefixes."""
    found = backend_or_default(backend)
    found.loop.wait(found.flush_cache())


def get_server_info(backend: Backend | None = None) -> Mapping[str, Any]:
    """What the server says of itself."""
    found = backend_or_default(backend)
    return found.loop.wait(found.server_info())
