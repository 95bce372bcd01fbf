"""``GET /v1/models``: each model as OpenAI's clients read it, and Anthropic's."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from sapwood_common.errors import NotFoundError


def list_models(contexts: Mapping[str, int], created: int) -> bytes:
    """The body of ``/v1/models``.

    Args:
        contexts: Each model's longest context, in tokens; 0: not known.
        created: A Unix time in seconds.
    """
    found = _objects(contexts, created)
    ends = {"first_id": found[0]["id"], "last_id": found[-1]["id"]} if found else {"first_id": None, "last_id": None}
    return msgspec.json.encode({"object": "list", "data": found, "has_more": False, **ends})


def get_model(contexts: Mapping[str, int], created: int, model: str) -> bytes:
    """The body of ``/v1/models/{id}``.

    Raises:
        NotFoundError: There is no such model.
    """
    for item in _objects(contexts, created):
        if item["id"] == model:
            return msgspec.json.encode(item)
    known = ", ".join(sorted(contexts)) or "none"
    raise NotFoundError(f"there is no model {model[:100]!r}; there is {known}", field="model")


def _objects(contexts: Mapping[str, int], created: int) -> list[dict[str, Any]]:
    return [
        {
            "id": model,
            "object": "model",
            "created": created,
            "owned_by": "sapwood",
            "root": model,
            "parent": None,
            "max_model_len": contexts[model] or None,
            "type": "model",
            "display_name": model,
            "created_at": datetime.fromtimestamp(created, UTC),
            "lifecycle": "active",
            "max_input_tokens": contexts[model] or None,
        }
        for model in sorted(contexts)
    ]
