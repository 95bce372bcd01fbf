"""``GET /v1/models``: each model as OpenAI's clients read it, and Anthropic's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from sapwood_common.errors import NotFoundError
from sapwood_router.flow.adapters import AdapterState


def list_models(contexts: Mapping[str, int], created: int, loras: Sequence[AdapterState] = ()) -> bytes:
    """The body of ``/v1/models``.

    Args:
        contexts: Each model's longest context, in tokens; 0: not known.
        created: A Unix time in seconds.
        loras: The adapters, which are listed after the models.
    """
    found = _objects(contexts, created, loras)
    ends = {"first_id": found[0]["id"], "last_id": found[-1]["id"]} if found else {"first_id": None, "last_id": None}
    return msgspec.json.encode({"object": "list", "data": found, "has_more": False, **ends})


def get_model(contexts: Mapping[str, int], created: int, model: str, loras: Sequence[AdapterState] = ()) -> bytes:
    """The body of ``/v1/models/{id}``; of an adapter also by ``MODEL:NAME``.

    Raises:
        NotFoundError: There is no such model.
    """
    for item in _objects(contexts, created, loras):
        if model in (item["id"], f"{item['parent']}:{item['id']}"):
            return msgspec.json.encode(item)
    known = ", ".join(sorted(contexts)) or "none"
    raise NotFoundError(f"there is no model {model[:100]!r}; there is {known}", field="model")


def _objects(contexts: Mapping[str, int], created: int, loras: Sequence[AdapterState]) -> list[dict[str, Any]]:
    found = [_object(model, contexts[model], created) for model in sorted(contexts)]
    for lora in loras:
        if lora.model in contexts:
            own = _object(lora.name, contexts[lora.model], created)
            # The path that vLLM shows here is on the workers' machines, and nothing for clients.
            found.append(own | {"root": lora.model, "parent": lora.model})
    return found


def _object(name: str, context: int, created: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "sapwood",
        "root": name,
        "parent": None,
        "max_model_len": context or None,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC),
        "lifecycle": "active",
        "max_input_tokens": context or None,
    }
