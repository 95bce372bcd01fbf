"""A session over a real model: its answers are those of single requests with all of its tokens, with and without a loss."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import grpc
import pytest

import sapwood
from sapwood.v1 import router_pb2, router_pb2_grpc

SETTINGS = {
    "load_format": "dummy",
    "num_pages": 256,
    "page_size": 4,
    "threads": 1,
    "worker_silence": 30,
    "resume_grace": 60,
}


def listens(pid: int, address: str) -> bool:
    """Whether a process listens on a port of this machine."""
    port = int(address.rpartition(":")[2])
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    sockets = {f"socket:[{each[9]}]" for each in lines if each[3] == "0A" and each[1].endswith(f":{port:04X}")}
    return any(str(file.readlink()) in sockets for file in Path(f"/proc/{pid}/fd").iterdir())


@pytest.mark.slow
def test_turns_are_cached_and_exact_also_after_their_worker_was_killed(tiny: Path, children: Any, until: Any) -> None:
    with sapwood.Server(str(tiny), workers=2, **SETTINGS) as server, server.client() as client:
        asked: dict[str, Any] = {"max_tokens": 9, "temperature": 0, "ignore_eos": True}
        session = client.open_session(120)
        first = client.generate(token_ids=list(range(3, 40)), session=session, **asked).answer()
        held = [*range(3, 40), *first.token_ids]

        def goes_on(session: str, held: list[int], more: list[int]) -> list[int]:
            answer = client.generate(token_ids=more, session=session, **asked).answer()
            alone = client.generate(token_ids=[*held, *more], **asked).answer()
            assert answer.token_ids == alone.token_ids
            assert answer.usage is not None and answer.usage.prompt_tokens == len(held) + len(more)
            cached.append(answer.usage.cached_tokens)
            return [*held, *more, *answer.token_ids]

        cached: list[int] = []
        fork_at = held
        held = goes_on(session, held, [5, 6, 7])
        assert cached[-1] >= len(fork_at) - 4  # all but the last, partial page
        fork = client.open_session(fork_of=session)
        mine, other = goes_on(session, held, [8, 9]), goes_on(fork, held, [10, 11])
        assert cached[-1] >= len(held) - 4 and mine != other
        client.close_session(fork)
        with grpc.insecure_channel(server.grpc_address) as channel:
            stub = router_pb2_grpc.RouterStub(channel)
            name = stub.GetSession(router_pb2.GetSessionRequest(id=session)).session.worker
            workers = stub.ListWorkers(router_pb2.ListWorkersRequest()).workers
            address = next(worker.address for worker in workers if worker.id == name)
            killed = next(
                pid for pid, module in children().items() if module == "sapwood_worker" and listens(pid, address)
            )
            os.kill(killed, signal.SIGKILL)
            mine = goes_on(session, mine, [12])
            found = stub.GetSession(router_pb2.GetSessionRequest(id=session)).session
            assert found.turns == 4 and found.tokens == len(mine)
        until(lambda: all(worker.healthy for worker in client.list_workers()))
        goes_on(session, mine, [13, 14])
