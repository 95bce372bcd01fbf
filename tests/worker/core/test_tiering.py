"""The tiers of a worker whose role changes while it runs."""

from __future__ import annotations

import threading
from typing import Literal

import msgspec
import pytest

from sapwood_testing.worker.fake_runner import FakeRunner
from sapwood_worker.config import WorkerConfig
from sapwood_worker.core.tiering import Tiering
from sapwood_worker.model.pools.host_pool import HostPool
from sapwood_worker.records.model_info import ModelInfo
from sapwood_worker.settings import HostCache

INFO = ModelInfo(
    architecture="fake",
    dtype="none",
    context_length=64,
    vocab_size=50,
    eos_token_ids=(),
    page_size=4,
    num_pages=32,
)


class SlowFiles(FakeRunner):
    """One whose model's files take long to read; ``read`` is set when they have been."""

    def __init__(self, error: str = "") -> None:
        super().__init__(msgspec.structs.replace(INFO), host_pool=HostPool(32, 4 * 8))
        self.read = threading.Event()
        self.error = error

    def cache_identity(self) -> str:
        assert self.read.wait(60)
        if self.error:
            raise OSError(self.error)
        return "slow"


def tiering(runner: SlowFiles) -> Tiering:
    assert runner.host_pool is not None
    return Tiering(WorkerConfig(host_cache=HostCache(ratio=1)), runner, runner.host_pool, 0.001)


def until_done(tiers: Tiering) -> None:
    while tiers.busy:
        tiers.poll()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_goes_on_while_the_models_files_are_read_for_its_new_role(role: Literal["prefill", "decode"]) -> None:
    runner = SlowFiles()
    tiers = tiering(runner)
    assert not tiers.fingerprint and not tiers.busy
    answers: list[str] = []
    tiers.command("role", role, answers.append)
    tiers.poll()
    assert tiers.busy and not answers and not tiers.fingerprint
    tiers.command("stats", "", answers.append)
    assert answers == [""]
    runner.read.set()
    until_done(tiers)
    assert answers == ["", ""] and tiers.fingerprint
    assert (tiers.cache.leases is not None, tiers.cache.reads is not None) == (role == "prefill", role == "decode")


def test_unreadable_files_leave_the_role_unchanged_and_a_later_try_may_succeed() -> None:
    runner = SlowFiles("No such file")
    runner.read.set()
    tiers = tiering(runner)
    answers: list[str] = []
    tiers.command("role", "prefill", answers.append)
    until_done(tiers)
    assert answers == ["the model's files cannot be read: No such file"] and tiers.cache.leases is None
    runner.error = ""
    for role in ("prefill", "decode"):  # one right after the other
        tiers.command("role", role, answers.append)
    until_done(tiers)
    assert answers[1:] == ["", ""] and tiers.cache.leases is not None and tiers.cache.reads is not None


def test_a_role_of_an_earlier_process_is_there_before_the_next_request() -> None:
    runner = SlowFiles()
    runner.read.set()
    tiers = tiering(runner)
    answers: list[str] = []
    tiers.command("restore_role", "prefill", answers.append)
    assert answers == [""] and tiers.cache.leases is not None and tiers.fingerprint
