"""The routes of an HTTP API: its paths, and their handlers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from sapwood_router.edges.http.errors import OPENAI, Dialect
from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.flow.generation import Pipeline

Handler = Callable[[Exchange], Awaitable[None]]
Answerer = Callable[[Exchange, bytes, Pipeline, float], Awaitable[None]]
"""Takes a body and the deadline, on the event loop's clock."""


@dataclass(frozen=True, slots=True)
class Post:
    """A path that takes JSON.

    Attributes:
        path: The path; one that ends with a slash stands for all paths below it, except ``/`` itself.
        answer: Answers.
        dialect: The format of errors.
        summary: What it does, for the OpenAPI document; "": it is not in there.
        takes: A body must match one of these types; empty: any object.
        gives: The type of answers; None: some object.
        settings: Sampling settings that bodies may have beside ``takes``.
        streams: Whether answers may be events.
    """

    path: str
    answer: Answerer
    dialect: Dialect = OPENAI
    summary: str = ""
    takes: tuple[type[msgspec.Struct], ...] = ()
    gives: type[msgspec.Struct] | None = None
    settings: frozenset[str] = frozenset()
    streams: bool = False
    is_folder: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Ask:
    """A path that takes no body.

    Attributes:
        path: See :class:`Post`.
        handler: Answers.
        method: The HTTP method.
        public: Whether no API key is asked for, and no page's origin.
        dialect: The format of errors; None: the format of the API that the request seems to use.
        summary, gives: See :class:`Post`.
        is_folder: Whether the route is exactly this path, with its slash at the end. Else the slash does not matter.
    """

    path: str
    handler: Handler
    method: str = "GET"
    public: bool = False
    dialect: Dialect | None = None
    summary: str = ""
    gives: type[msgspec.Struct] | None = None
    is_folder: bool = False


Route = Post | Ask
