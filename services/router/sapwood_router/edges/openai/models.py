"""``GET /v1/models``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from sapwood_common.errors import NotFoundError


def list_models(contexts: Mapping[str, int], created: int) -> bytes:
    """The body of ``/v1/models``.

    Args:
        contexts: Each model's longest context, in tokens.
        created: A Unix time in seconds.
    """
    return msgspec.json.encode({"object": "list", "data": _objects(contexts, created)})


def get_model(contexts: Mapping[str, int], created: int, model: str) -> bytes:
    """The body of ``/v1/models/{id}``.

    Raises:
        NotFoundError: There is no such model.
    """
    for item in _objects(contexts, created):
        if item["id"] == model:
            return msgspec.json.encode(item)
    raise NotFoundError(f"there is no model {model!r}", field="model")


def _objects(contexts: Mapping[str, int], created: int) -> list[dict[str, Any]]:
    return [
        {
            "id": model,
            "object": "model",
            "created": created,
            "owned_by": "sapwood",
            "root": model,
            "parent": None,
            "max_model_len": contexts[model],
        }
        for model in sorted(contexts)
    ]
