"""What an HTTP API adds to the front: its paths, and what answers them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from sapwood_router.edges.http.errors import OPENAI, Dialect
from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.flow.pipeline import Pipeline

Handler = Callable[[Exchange], Awaitable[None]]
Answerer = Callable[[Exchange, bytes, Pipeline, float], Awaitable[None]]
"""Takes a body and the deadline, on the event loop's clock."""


@dataclass(frozen=True, slots=True)
class Post:
    """A path that takes JSON.

    Attributes:
        path: The path; one that ends with a slash stands for all below it.
        answer: Answers.
        dialect: How errors are told.
    """

    path: str
    answer: Answerer
    dialect: Dialect = OPENAI


@dataclass(frozen=True, slots=True)
class Ask:
    """A path that takes no body.

    Attributes:
        path: As of :class:`Post`.
        handler: Answers.
        method: The HTTP method.
        public: Whether no API key is asked for, and no page's origin.
        dialect: How errors are told.
    """

    path: str
    handler: Handler
    method: str = "GET"
    public: bool = False
    dialect: Dialect = OPENAI


Route = Post | Ask
