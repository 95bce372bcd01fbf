"""The service's methods while the model's files are read: a router that hears from it keeps requests waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sapwood.v1 import tokenizer_pb2_grpc
from sapwood_common.errors import UnavailableError


class StartingService:
    """A servicer that passes calls on to the service once there is one; until then they raise UnavailableError.

    Attributes:
        service: What answers. To be set once.
    """

    def __init__(self) -> None:
        self.service: tokenizer_pb2_grpc.TokenizerServicer | None = None

    def __getattr__(self, method: str) -> Callable[[Any, Any], Any]:
        def call(request: Any, context: Any) -> Any:
            if self.service is None:
                raise UnavailableError("the tokenizer is starting", retry_after=1.0)
            return getattr(self.service, method)(request, context)

        return call
