"""Numbers that no enum has are refused, and the field is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor

from sapwood.v1 import router_pb2, tokenizer_pb2, worker_pb2
from sapwood_common.errors import InvalidArgumentError
from sapwood_router.edges.grpc.convert import embed_request_of, tool_choice_of
from sapwood_router.edges.grpc.convert_operators import to_pause_mode
from sapwood_router.request.caller import Caller
from sapwood_worker.front.convert import to_pooling, to_role, to_tier_names
from sapwood_worker.front.sleep import to_memory
from sapwood_worker.front.weights import to_in_flight
from sapwood_worker.records.model_info import ModelInfo

INFO = ModelInfo(
    architecture="llama", dtype="float32", context_length=8, vocab_size=8, eos_token_ids=(), page_size=1, num_pages=8
)
READERS: dict[str, Callable[[int], Any]] = {
    "WorkerEmbedRequest.pooling": lambda value: to_pooling(value, INFO),  # type: ignore[arg-type]
    "SetRoleRequest.role": to_role,  # type: ignore[dict-item]
    "UpdateWeightsRequest.in_flight": to_in_flight,  # type: ignore[dict-item]
    "ClearCacheRequest.tiers": lambda value: to_tier_names(worker_pb2.ClearCacheRequest(tiers=[value])),  # type: ignore[list-item]
    "SleepRequest.memory": lambda value: to_memory([value]),  # type: ignore[list-item]
    "WakeUpRequest.memory": lambda value: to_memory([value]),  # type: ignore[list-item]
    "PauseRequestsRequest.mode": to_pause_mode,  # type: ignore[dict-item]
    "RouterGenerateRequest.tool_choice": lambda value: tool_choice_of(
        router_pb2.RouterGenerateRequest(tool_choice=value)  # type: ignore[arg-type]
    ),
    "RouterEmbedRequest.pooling": lambda value: embed_request_of(
        router_pb2.RouterEmbedRequest(model="m", pooling=value),  # type: ignore[arg-type]
        "r",
        0.0,
        Caller(),
    ),
}


def enum_fields() -> set[str]:
    """Fields of requests that hold a number of an enum."""
    found = set()
    for module in (router_pb2, tokenizer_pb2, worker_pb2):
        for name, message in module.DESCRIPTOR.message_types_by_name.items():
            if name.endswith("Request"):
                found |= {f"{name}.{each.name}" for each in message.fields if each.type == FieldDescriptor.TYPE_ENUM}
    return found


def test_every_enum_of_a_request_is_tried() -> None:
    assert enum_fields() == READERS.keys()


@pytest.mark.parametrize("field", READERS)
@pytest.mark.parametrize("value", [-1, 99, 2**31 - 1, -(2**31)])
def test_a_number_that_an_enum_does_not_have_is_refused_by_name(field: str, value: int) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        READERS[field](value)
    assert raised.value.field == field.partition(".")[2]
