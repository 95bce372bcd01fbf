"""Decodes on a CPU as one call: the layers' C calls, recorded in the first step with a given number of tokens and run again in
later ones."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from sapwood_kernels.native.products import SMALL, NativeLibrary
from sapwood_kernels.native.steps import Recording
from sapwood_kernels.ops.cpu import CpuOps
from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.attention.paged import PagedPlan
from sapwood_worker.model.attention.torch_native import native_parts
from sapwood_worker.model.families.decoder import DecoderModel
from sapwood_worker.model.layers.rotary import Angles
from sapwood_worker.model.runner.forward_batch import ForwardBatch
from sapwood_worker.model.runner.options import RunnerOptions

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Recorded:
    recording: Recording
    result: Tensor | None  # None: the layers change their input


class RecordedSteps:
    """Runs the layers for one token of each of a few requests.

    Layers that use torch for anything except sums in place cannot be recorded: a model with such a layer never has a recorded
        step.

    Args:
        model: The model, whole and on one rank.
        library: The library that its layers call.

    Attributes:
        runs: Steps that were run from a recording.
        refused: Why nothing is recorded; None: no obstacle so far.
    """

    def __init__(self, model: DecoderModel, library: NativeLibrary) -> None:
        self.runs = 0
        self.refused: str | None = None
        self._model = model
        self._library = library
        self._recorded: dict[int, _Recorded] = {}

    def run(self, batch: ForwardBatch, plan: PagedPlan) -> Tensor | None:
        """The hidden states after every token, [T, hidden_size], as the model returns them; None: the model must compute them.

        Args:
            batch: The step.
            plan: Its attention.
        """
        tokens, tables = len(batch.token_ids), batch.attention.tables
        if self.refused is not None or tokens > SMALL or tokens != len(batch.attention.seq_lens):
            return None
        attention = None if plan.whole is None else native_parts(plan.whole)
        if attention is None:
            return None
        hidden = self._model.begin(batch.token_ids, batch.positions)
        angles = self._model.angles(batch.positions)
        inputs = [hidden.data_ptr()]
        inputs += [each.data_ptr() for one in angles for each in one if each is not None]
        inputs += [table.cache_slots.data_ptr() for table in tables]
        strides: dict[int, int] = {}
        for part in attention:
            strides[len(inputs)] = part.pages.strides[0] // part.pages.itemsize
            inputs += [part.pages.ctypes.data, part.lengths.ctypes.data]
        found = self._recorded.get(tokens)
        if found is None:
            return self._record(hidden, angles, plan, inputs)
        found.recording.run(inputs, strides)
        self.runs += 1
        return hidden if found.result is None else found.result.clone()

    def forget(self) -> None:
        """Forgets all recordings: the weights whose addresses they hold have been exchanged."""
        self._recorded.clear()

    def _record(self, hidden: Tensor, angles: list[Angles], plan: PagedPlan, inputs: list[int]) -> Tensor:
        recording = Recording(self._library)
        fit = len(set(inputs)) == len(inputs)  # else they could not be told apart
        again = hidden.clone()
        with recording.record(inputs):
            result = self._model.through(hidden, angles, plan)
        computed = result.clone()
        kept = None if result.data_ptr() == hidden.data_ptr() else result
        if recording.refused is not None:
            self.refused = f"{recording.refused} is computed by torch"
        elif fit:
            recording.run([again.data_ptr(), *inputs[1:]], {})
            if torch.equal(again if kept is None else kept, computed):
                self._recorded[len(hidden)] = _Recorded(recording, kept)
            else:  # not all calls were those of this library
                self.refused = "a recording gave other numbers"
        if self.refused is not None:
            logger.info("decodes are computed call by call: %s", self.refused)
        return computed


def record_steps(
    options: RunnerOptions, model: DecoderModel, ops: DeviceOps, dtype: torch.dtype
) -> RecordedSteps | None:
    """The recorder of a model's decodes, on a CPU if C code can compute all of their layers; None: they cannot be recorded.

    Args:
        options: As the model was loaded; without ``cuda_graphs`` nothing is recorded.
        model: The model.
        ops: The device's operations.
        dtype: The dtype of activations.
    """
    alone = options.parallel.tp.size == options.parallel.pp.size == 1
    if not isinstance(ops, CpuOps) or ops.native is None or dtype != torch.float32 or not options.cuda_graphs:
        return None
    return (
        RecordedSteps(model, ops.native)
        if alone and model.aux_hidden_states is None and model.config.sparse is None
        else None
    )
