"""Seeds of continuations."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sapwood_common.contract.seeds import child_seed


def test_seeds_of_continuations_never_change():
    # A continuation resumed by another router must continue alike.
    assert [child_seed(7, index) for index in range(3)] == [7, 12012694768356207812, 6145397147575220561]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(1, 127), st.integers(1, 127))
def test_seeds_of_other_seeds_and_indices_are_others(seed, other, index, another):
    assert 0 <= child_seed(seed, index) < 2**64
    assert (child_seed(seed, index) == child_seed(other, another)) == ((seed, index) == (other, another))
    assert child_seed(seed + 2**64, index) == child_seed(seed, index)
