"""An :class:`~sapwood.Engine` or :class:`~sapwood.AsyncEngine` of this program."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sapwood.lang.backends.sapwood import Sapwood
from sapwood.lang.templates import Template

if TYPE_CHECKING:
    from sapwood.embedded.async_engine import AsyncEngine
    from sapwood.embedded.engine import Engine


class EngineBackend(Sapwood):
    """A started engine. Its router is asked over its Unix socket; the caller closes the engine.

    Args:
        engine: The engine.
        template: As for :class:`~sapwood.lang.backends.sapwood.Sapwood`.

    Raises:
        UnavailableError: It was not started, or has ended.
    """

    def __init__(self, engine: Engine | AsyncEngine, *, template: Template | str | None = None) -> None:
        super().__init__(engine.address, template=template)
        self.name = "the engine"
