"""The target that an address asks for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sapwood.bench.data.conversation import Api
from sapwood.bench.targets.openai_http import OpenAITarget, parse_url
from sapwood.bench.targets.sapwood_grpc import GrpcTarget
from sapwood.bench.targets.target import Sampling, Target


@dataclass(frozen=True, slots=True)
class Where:
    """A server's address.

    Attributes:
        url: Where an OpenAI-compatible server is; None for gRPC.
        grpc: ``host:port`` of a Sapwood router; used where there is no URL.
        api: Which of the two APIs; None: as the URL says, else completions.
        model: Its name; None: the first that the server lists.
        api_key: Sent with each request.
        ca: PEM file of the authority that signed the server's certificate; over gRPC it turns TLS on.
        timeout: Seconds that a request may take.
    """

    url: str | None
    grpc: str = ""
    api: Api | None = None
    model: str | None = None
    api_key: str | None = None
    ca: Path | None = None
    timeout: float = 600.0

    @property
    def api_used(self) -> Api:
        """The API that is asked."""
        return self.api or (parse_url(self.url)[1] if self.url is not None else None) or "completions"

    def __str__(self) -> str:
        return self.url if self.url is not None else f"grpc://{self.grpc}"


def open_target(where: Where, sampling: Sampling) -> Target:
    """The target; it connects with :meth:`Target.connect`, inside a running event loop.

    Raises:
        ValueError: The URL is none.
        OSError: The file of the CA cannot be read.
    """
    if where.url is None:
        return GrpcTarget(
            where.grpc,
            where.api_used,
            sampling,
            model=where.model,
            api_key=where.api_key,
            ca=None if where.ca is None else where.ca.read_bytes(),
            timeout=where.timeout,
        )
    return OpenAITarget(
        parse_url(where.url)[0],
        where.api_used,
        sampling,
        model=where.model,
        api_key=where.api_key,
        ca=where.ca,
        timeout=where.timeout,
    )
