"""Copies of states between slots: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
copy_states = pytest.importorskip("sapwood_kernels.state.triton_copy").copy_states

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("numbers", [5, 4096, 5000])
def test_slots_become_copies_in_all_layers_and_others_stay(numbers):
    states = torch.randn(3, 6, numbers, device=DEVICE)
    wanted = states.clone()
    wanted[:, [5, 2]] = wanted[:, [0, 3]]
    copy_states(states, torch.tensor([[0, 3], [5, 2]], device=DEVICE))
    assert torch.equal(states, wanted)


def test_a_layer_whose_slots_lie_apart_is_copied():
    every = torch.randn(4, 30, device=DEVICE)
    wanted = every.clone()
    wanted[1, :20] = wanted[2, :20]
    copy_states(every[None, :, :20], torch.tensor([[2], [1]], device=DEVICE))
    assert torch.equal(every, wanted)
