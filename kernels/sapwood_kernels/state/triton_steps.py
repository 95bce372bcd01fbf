"""Triton: steps of one token a row of all kinds of states."""

from __future__ import annotations

from sapwood_kernels.state.triton_convolution_step import convolution_step, gated_convolution_step
from sapwood_kernels.state.triton_delta_step import delta_step
from sapwood_kernels.state.triton_selective_step import selective_step
from sapwood_kernels.state.triton_space_step import linear_step, space_step


class TritonStateSteps:
    """Implements :class:`sapwood_kernels.state.contracts.StateSteps`."""

    delta = staticmethod(delta_step)
    convolve = staticmethod(convolution_step)
    convolve_gated = staticmethod(gated_convolution_step)
    space = staticmethod(space_step)
    linear = staticmethod(linear_step)
    selective = staticmethod(selective_step)
