"""Logits of models that take pictures equal transformers', for text, one picture and several, however a prompt is cut."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sapwood_common.errors import InvalidArgumentError
from sapwood_testing.models.same_logits import assert_same_logits
from sapwood_testing.models.vision_models import VISION, make_vision
from sapwood_testing.models.vision_prompts import Prompts, picture
from sapwood_worker.records.pictures import Picture

NAMES = list(VISION)
SOME = ["qwen3_vl", "internvl"]


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Prompts]:
    made: dict[str, Prompts] = {}

    def make(name: str) -> Prompts:
        if name not in made:
            made[name] = Prompts(make_vision(name, tmp_path_factory.mktemp(name)))
        return made[name]

    return make


@pytest.mark.parametrize("name", NAMES)
def test_text_pictures_and_several_in_one_batch_have_the_logits_of_transformers(
    vision: Any, seeing: Any, name: str
) -> None:
    made = vision(name)
    driver = seeing(made.tiny.path)
    shown = [[], [picture(0)], [picture(1), picture(2)]]
    prompts = [
        made.make("no picture, only text"),
        made.make("one ", shown[1][0], " and text"),
        made.make("two ", shown[2][0], " with text between ", shown[2][1], " and behind"),
    ]
    for slot, (tokens, pictures) in enumerate(prompts):
        driver.add(slot, tokens)
        driver.show(slot, pictures)
    ours = driver.runner.logits(driver.output({slot: len(tokens) for slot, (tokens, _) in enumerate(prompts)}))
    parts = ours.split([len(tokens) for tokens, _ in prompts])
    for part, (tokens, _), images in zip(parts, prompts, shown, strict=True):
        assert_same_logits(part, made.tiny.logits(tokens, images))
    assert driver.runner.pictures.encoded == 3


@pytest.mark.parametrize("name", NAMES)
def test_chunks_that_end_within_a_picture_and_decodes_behind_it_equal_transformers(
    vision: Any, seeing: Any, name: str
) -> None:
    made = vision(name)
    driver = seeing(made.tiny.path, page_size=4)
    image = picture(0)
    tokens, pictures = made.make("before ", image, " behind")
    theirs = made.tiny.logits([*tokens, 65, 66], [image])
    driver.add(1, [*tokens, 65, 66])
    driver.show(1, pictures)
    whole = driver.runner.pictures.vision.whole
    first = pictures[0].offset
    cuts = [first, pictures[0].length] if whole else [first + 3, 7]
    cuts = [*cuts, len(tokens) - sum(cuts), 1, 1]
    parts = [driver.runner.logits(driver.output({1: count})) for count in cuts]
    assert_same_logits(torch.cat(parts), theirs)
    assert driver.runner.pictures.encoded == 1


@pytest.mark.parametrize("name", SOME)
def test_a_second_use_of_a_picture_is_not_encoded_again_and_another_one_is(vision: Any, seeing: Any, name: str) -> None:
    made = vision(name)
    driver = seeing(made.tiny.path)
    for number, seed in enumerate((0, 0, 1)):
        tokens, pictures = made.make(f"prompt {number} ", picture(seed), " end")
        driver.add(0, tokens)
        driver.show(0, pictures)
        ours = driver.runner.logits(driver.output({0: len(tokens)}))
        assert_same_logits(ours, made.tiny.logits(tokens, [picture(seed)]))
    assert (driver.runner.pictures.encoded, driver.runner.pictures.reused) == (2, 1)


@pytest.mark.parametrize("name", SOME)
def test_encodings_beyond_the_bound_are_made_again_and_right(vision: Any, seeing: Any, name: str) -> None:
    made = vision(name)
    driver = seeing(made.tiny.path, picture_cache_bytes=0)
    tokens, pictures = made.make("a ", picture(0), " b ", picture(1), " c")
    for _ in range(2):
        driver.add(2, tokens)
        driver.show(2, pictures)
        ours = driver.runner.logits(driver.output({2: len(tokens)}))
        assert_same_logits(ours, made.tiny.logits(tokens, [picture(0), picture(1)]))
    assert driver.runner.pictures.encoded == 4


@pytest.mark.parametrize("name", SOME)
def test_encodings_that_gave_way_are_found_in_the_hosts_memory_and_right(vision: Any, seeing: Any, name: str) -> None:
    made = vision(name)
    driver = seeing(made.tiny.path, picture_cache_bytes=0, picture_host_bytes=1 << 30)
    tokens, pictures = made.make("a ", picture(0), " b ", picture(1), " c")
    for _ in range(2):
        driver.add(2, tokens)
        driver.show(2, pictures)
        ours = driver.runner.logits(driver.output({2: len(tokens)}))
        assert_same_logits(ours, made.tiny.logits(tokens, [picture(0), picture(1)]))
    use = driver.runner.picture_use()
    assert (use.encoded, use.device, use.host, use.device_bytes) == (2, 0, 2, 0)
    levels = driver.runner.pictures.vision.levels
    assert use.host_bytes == use.tokens * levels * 64 * 4, "float32 [levels, tokens, hidden size]"
    assert use.seconds > 0


@pytest.mark.parametrize("name", SOME)
def test_a_picture_that_its_tokens_do_not_fit_is_refused_by_name(vision: Any, seeing: Any, name: str) -> None:
    made = vision(name)
    runner = seeing(made.tiny.path).runner
    tokens, (shown,) = made.make("a ", picture(0), " b")
    runner.check_pictures([shown], array("I", tokens))
    tokens[shown.offset] = 5
    with pytest.raises(InvalidArgumentError, match="tokens stand for a picture of") as caught:
        runner.check_pictures([shown], array("I", tokens))
    assert caught.value.field == "pictures[0]"
    odd = Picture(shown.offset, shown.length, b"", (shown.shape[0] + 40, 1, 1), (), b"")
    with pytest.raises(InvalidArgumentError, match="the model does not take this picture"):
        runner.check_pictures([odd], array("I", tokens))


@pytest.mark.parametrize("name", SOME)
def test_without_pictures_a_model_serves_text_alone(vision: Any, seeing: Any, name: str) -> None:
    made = vision(name)
    driver = seeing(made.tiny.path, pictures=False)
    tokens, _ = made.make("text alone")
    driver.add(0, tokens)
    assert_same_logits(driver.runner.logits(driver.output({0: len(tokens)})), made.tiny.logits(tokens, []))
    assert driver.runner.info.pictures is None
