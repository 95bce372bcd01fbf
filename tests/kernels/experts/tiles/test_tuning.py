"""Tiles of experts: by a model, measured within a time, and kept in a file."""

from __future__ import annotations

import json
import math

import pytest

from sapwood_kernels.experts.tiles.plan import HEIGHTS, TileShape, TileTable, candidates, modelled_tiles, tile_height
from sapwood_kernels.experts.tiles.tuning import TOKENS, Tuning, tuned

EXPERTS, CHOSEN = 128, 8


class Gpu:
    """A product's time by a formula: padding of tiles and reading of matrices; each measurement takes a second of its clock."""

    def __init__(self, broken: TileShape | None = None) -> None:
        self.now, self.broken = 0.0, broken

    def measure(self, pairs: int, height: int, part: str, shape: TileShape) -> float:
        self.now += 1
        if shape == self.broken:
            return math.inf
        tiles = EXPERTS * -(-max(pairs // EXPERTS, 1) // height)
        waves = -(-tiles * -(-1536 // shape.width) // (132 * 8 // shape.warps))
        return (
            waves * height * (shape.width + 900 / shape.stages) * (1.1 if part == "down" and shape.depth > 64 else 1.0)
        )

    def clock(self) -> float:
        return self.now


def time_of(gpu, pairs, plan):
    return gpu.measure(pairs, plan.height, "gate_up", plan.gate_up) + gpu.measure(pairs, plan.height, "down", plan.down)


def test_eighteen_sizes_are_within_three_percent_of_all_that_could_be_tried(tmp_path):
    gpu = Gpu()
    table, tuning = tuned(EXPERTS, CHOSEN, gpu.measure, tmp_path / "tiles.json", math.inf, gpu.clock)
    assert tuning == Tuning("measured", 18, gpu.now)
    every = {
        shape
        for tokens in TOKENS
        for shapes in candidates(tokens * CHOSEN, EXPERTS, CHOSEN).values()
        for shape in shapes
    }
    for pairs in (tokens * CHOSEN for tokens in TOKENS):
        best = min(
            sum(min(gpu.measure(pairs, height, part, shape) for shape in every) for part in ("gate_up", "down"))
            for height in HEIGHTS
        )
        assert time_of(gpu, pairs, table.plan(pairs)) <= 1.03 * best
        assert time_of(gpu, pairs, table.plan(pairs)) <= time_of(gpu, pairs, modelled_tiles(pairs, EXPERTS))


def test_when_time_is_up_the_rest_goes_by_the_model(tmp_path):
    gpu = Gpu()
    table, tuning = tuned(EXPERTS, CHOSEN, gpu.measure, tmp_path / "tiles.json", 30, gpu.clock)
    assert 0 < tuning.sizes < 18
    last = TOKENS[tuning.sizes - 1]
    assert last * CHOSEN in table.measured
    assert table.plan(512 * CHOSEN) == table.measured[256 * CHOSEN], "what is measured serves up to twice as many"
    assert table.plan(6000) == modelled_tiles(6000, EXPERTS)


def test_a_later_start_reads_what_was_found_and_measures_nothing(tmp_path):
    gpu, path = Gpu(), tmp_path / "a" / "tiles.json"
    table, tuning = tuned(EXPERTS, CHOSEN, gpu.measure, path, math.inf, gpu.clock)
    took = gpu.now
    again, found = tuned(EXPERTS, CHOSEN, gpu.measure, path, math.inf, gpu.clock)
    assert gpu.now == took
    assert (again, found) == (table, Tuning("file", 18, tuning.seconds))
    assert [each.name for each in path.parent.iterdir()] == ["tiles.json"]


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"plans": {"8": [16, [1], []]}, "seconds": 1}', '{"plans": 3, "seconds": 1}']
)
def test_a_file_that_holds_no_tiles_is_written_again(tmp_path, text):
    path = tmp_path / "tiles.json"
    path.write_text(text)
    _, tuning = tuned(EXPERTS, CHOSEN, Gpu().measure, path, math.inf)
    assert tuning.source == "measured"
    assert len(json.loads(path.read_text())["plans"]) == 18


def test_a_folder_that_cannot_be_written_costs_only_the_next_start(tmp_path):
    (tmp_path / "file").write_text("")
    table, tuning = tuned(EXPERTS, CHOSEN, Gpu().measure, tmp_path / "file" / "tiles.json", math.inf)
    assert tuning.sizes == len(table.measured) == 18


def test_a_shape_that_does_not_run_is_not_taken(tmp_path):
    broken = modelled_tiles(8, EXPERTS).gate_up
    gpu = Gpu(broken)
    table, _ = tuned(EXPERTS, CHOSEN, gpu.measure, tmp_path / "tiles.json", math.inf, gpu.clock)
    assert all(broken not in (plan.gate_up, plan.down) for plan in table.measured.values())


def test_without_measurements_tiles_go_by_the_model():
    assert TileTable(EXPERTS).plan(77) == modelled_tiles(77, EXPERTS)


@pytest.mark.parametrize("stored", [False, True])
def test_what_is_modelled_is_worth_measuring_and_serves_where_nothing_was(tmp_path, stored):
    for pairs in (1, 8, 100, 3072, 4096, 9000, 65536):
        plan, tried = modelled_tiles(pairs, EXPERTS, stored=stored), candidates(pairs, EXPERTS, CHOSEN, stored=stored)
        assert {plan.gate_up, plan.down} <= set(tried[plan.height])
    for source in ("measured", "file"):
        gpu = Gpu()
        table, found = tuned(EXPERTS, CHOSEN, gpu.measure, tmp_path / "tiles.json", 30, gpu.clock, stored=stored)
        assert found.source == source
        assert table.plan(6000) == modelled_tiles(6000, EXPERTS, stored=stored)


def test_tiles_are_higher_where_all_tokens_go_to_some_experts():
    table = TileTable(66, filled=16 * 8)
    plans = [table.plan(tokens * 8) for tokens in (1, 16, 17, 64, 256)]
    assert [each.height for each in plans] == [1, 16, 32, 32, 64]
    assert plans[4][1:] == plans[3][1:] == modelled_tiles(128, 66)[1:]


@pytest.mark.parametrize(
    ("pairs", "experts", "height"), [(8, 128, 16), (3072, 128, 32), (3073, 128, 64), (65536, 8, 128)]
)
def test_a_tile_is_a_third_higher_than_an_expert_has_tokens(pairs, experts, height):
    assert tile_height(pairs, experts) == height
