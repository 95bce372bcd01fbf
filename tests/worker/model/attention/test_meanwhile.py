"""While libraries are compiled something else computes prompts; then they do, and nobody has waited."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from sapwood_common.contract.sampling import SamplingParams
from sapwood_kernels.attention.planned import AttentionShape, Variant
from sapwood_kernels.compiled.early import EarlyBuild
from sapwood_kernels.ops.factory import device_ops
from sapwood_testing.worker.steps import Part, step_for
from sapwood_worker.model.attention.backend import AttentionBackend, AttentionNeeds, AttentionParts, StepAttention
from sapwood_worker.model.attention.fallback import meanwhile
from sapwood_worker.model.attention.registry import ChosenBackend
from sapwood_worker.model.attention.torch_native import TORCH
from sapwood_worker.model.runner import attention_builder, builder


class Library:
    """What compiles until it is told to end, and who planned steps in its place and with it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.ended = threading.Event()
        self.planned: list[str] = []
        self._error = error
        self.build = EarlyBuild(["fa3"], self._compile)

    def _compile(self) -> None:
        self.ended.wait()
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        self.ended.set()
        self.build._thread.join()

    def backend(self, name: str) -> AttentionBackend:
        def make(parts: AttentionParts) -> StepAttention:
            assert TORCH.prefill is not None
            attention = TORCH.prefill(parts)
            plan = attention.plan
            attention.plan = lambda batch: (self.planned.append(name), plan(batch))  # type: ignore[method-assign, assignment, return-value]
            return attention

        return replace(TORCH, prefill=make, decode=make, shared=None, shared_prompts=None)


@pytest.fixture
def make_cold_runner(tiny_model, make_runner, monkeypatch):
    """Makes a runner whose backend of choice needs a library that is being compiled."""

    def make(library: Library, **options):
        monkeypatch.setattr(builder, "begin_kernels", lambda *args, **named: library.build)
        chosen = ChosenBackend("flashinfer", library.backend("flashinfer"), "the fastest here")
        monkeypatch.setattr(attention_builder, "choose_backend", lambda *args: chosen)
        monkeypatch.setattr(attention_builder, "meanwhile", partial(meanwhile, now=library.backend("triton")))
        return make_runner(tiny_model("qwen3").path, num_pages=64, page_size=4, **options)

    return make


def prompt(runner, number: int) -> torch.Tensor:
    table = np.arange(20, dtype=np.int32)[None]
    tokens = np.random.default_rng(1).integers(3, 50, 30).tolist()
    return runner.logits(step_for(runner.info, number, table, [Part(0, tokens, 0, 1, SamplingParams())]))


def test_prompts_are_computed_before_the_library_is_there_and_by_it_afterwards(make_cold_runner, caplog):
    library = Library()
    runner = make_cold_runner(library, kernels_wait=False)
    first = prompt(runner, 0)
    assert set(library.planned) == {"triton"}
    assert runner.info.decode_attention == "triton"
    assert "by triton until its libraries are compiled" in runner.info.attention_reason
    library.end()
    with caplog.at_level("INFO"):
        torch.testing.assert_close(prompt(runner, 1), first)
        prompt(runner, 2)
    assert library.planned[-2:] == ["flashinfer"] * 2 and "triton" in library.planned
    assert sum("by FlashInfer from now on" in each.message for each in caplog.records) == 1


def test_a_library_that_cannot_be_compiled_leaves_prompts_where_they_are(make_cold_runner, caplog):
    library = Library(RuntimeError("nvcc is not there"))
    runner = make_cold_runner(library, kernels_wait=False)
    library.end()
    prompt(runner, 0)
    assert set(library.planned) == {"triton"}
    assert "FlashInfer cannot be compiled: nvcc is not there" in caplog.text


def test_a_worker_that_is_to_wait_has_the_library_for_its_first_request(make_cold_runner):
    library = Library()
    threading.Timer(0.2, library.ended.set).start()
    runner = make_cold_runner(library, kernels_wait=True)
    assert library.build.done
    prompt(runner, 0)
    assert set(library.planned) == {"flashinfer"}


def test_where_nothing_else_can_compute_a_model_there_is_nothing_for_the_meantime():
    library, chosen = Library(), ChosenBackend("flashinfer", TORCH, "the fastest here")
    shape = AttentionShape(4, 2, 16, 16, torch.float32)
    needs = AttentionNeeds(shape, torch.float32, (Variant(1.0, None, None),), 100)
    ops = device_ops("cpu")
    assert meanwhile(chosen, chosen, needs, ops, library.build, replace(TORCH, prefill=None)) is None
    told = ChosenBackend("torch", TORCH, "as told")
    assert meanwhile(told, told, needs, ops, library.build, TORCH) == (told, told)
    library.end()
