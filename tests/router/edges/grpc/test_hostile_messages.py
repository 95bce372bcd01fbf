"""Messages of every method, whose fields hold what nobody means: no answer says that the router is at fault."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import Message

from sapwood.v1 import router_pb2
from sapwood_testing.hostile_messages import faults, hostile_messages

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

METHODS = {each.name: each for each in router_pb2.DESCRIPTOR.services_by_name["Router"].methods}
GOOD: dict[str, Message] = {
    "Generate": router_pb2.RouterGenerateRequest(text="a"),
    "Score": router_pb2.RouterScoreRequest(text="a", continuations=[router_pb2.Continuation(text="b")]),
    "Embed": router_pb2.RouterEmbedRequest(),
    "Classify": router_pb2.ClassifyRequest(),
}
"""What a message with one strange field is otherwise; of other methods nothing."""


@pytest.mark.parametrize("name", sorted(METHODS.keys() - {"PauseRequests", "ResumeRequests", "RegisterWorker"}))
async def test_no_message_is_the_routers_fault(cluster: Any, name: str) -> None:
    for worker in cluster.workers:
        worker.script.tokens = lambda prompt: [104, 105]
    messages = hostile_messages(METHODS[name], GOOD.get(name))
    wrong = await faults(cluster.stub, METHODS[name], messages)
    print(name, len(messages), "messages")
    assert not wrong, wrong[:3]
    await cluster.idle()
