"""What a rank reads of words and groups of numbers."""

from __future__ import annotations

import pytest

from sapwood_common.errors import ConfigError
from sapwood_worker.model.quantization.linear_method import Stored
from sapwood_worker.model.quantization.packing import divided
from sapwood_worker.model.weight_slot import Span, whole


def test_a_part_is_whole_groups_of_which_the_last_may_be_short():
    assert divided(Stored(), "a", Span(128, 128, 384), 128) == Span(1, 1, 3)
    assert divided(Stored(), "a", Span(256, 44, 300), 128) == Span(2, 1, 3)
    assert divided(Stored(), "a", Span(64, 64, 128), 128) == whole(1), "one for all"


@pytest.mark.parametrize(("start", "end"), [(0, 64), (64, 192)])
def test_a_part_that_divides_a_group_is_refused_by_its_ends(start: int, end: int):
    said = f"tensor a .*a part, numbers {start} to {end}, divides 128 that belong together"
    with pytest.raises(ConfigError, match=said):
        divided(Stored(), "a", Span(start, end - start, 256), 128)
