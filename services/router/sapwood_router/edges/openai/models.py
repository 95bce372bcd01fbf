"""``GET /v1/models``."""

from __future__ import annotations

from typing import Any

import msgspec

from sapwood_common.errors import NotFoundError
from sapwood_router.fleet.registry import Registry


def list_models(registry: Registry, created: int) -> bytes:
    """The body of ``/v1/models``; ``created`` is a Unix time in seconds."""
    return msgspec.json.encode({"object": "list", "data": _objects(registry, created)})


def get_model(registry: Registry, created: int, model: str) -> bytes:
    """The body of ``/v1/models/{id}``.

    Raises:
        NotFoundError: There is no such model.
    """
    for item in _objects(registry, created):
        if item["id"] == model:
            return msgspec.json.encode(item)
    raise NotFoundError(f"there is no model {model!r}", field="model")


def _objects(registry: Registry, created: int) -> list[dict[str, Any]]:
    return [
        {
            "id": model,
            "object": "model",
            "created": created,
            "owned_by": "sapwood",
            "root": model,
            "parent": None,
            "max_model_len": registry.context_length(model),
        }
        for model in sorted(registry.models())
    ]
