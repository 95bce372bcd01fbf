"""Videos of Qwen's models: frames, pixels, tokens and logits equal transformers', however a prompt is cut."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sapwood_common.contract.pictures import Clip
from sapwood_testing.models.same_logits import assert_same_logits
from sapwood_testing.models.video_processor import video_processor
from sapwood_testing.models.vision_models import make_vision
from sapwood_testing.models.vision_prompts import VIDEOS, Prompts, Video, picture, video
from sapwood_tokenizer.pictures.videos import prepare_video
from sapwood_worker.model.vision.qwen2_vl import PatchGrid
from sapwood_worker.model.vision.tower import CLIP_MEAN, CLIP_STD, Normaliser
from sapwood_worker.records.pictures import Picture

NAMES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
VIDEO = 262


@pytest.fixture(scope="module", params=NAMES)
def made(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    return Prompts(make_vision(request.param, tmp_path_factory.mktemp(request.param)))


def processed(made: Prompts, shown: Video) -> Any:
    """What transformers' video processor makes of it."""
    family = "qwen3_vl" if "Qwen3" in type(made.tiny.oracle).__name__ else "qwen2_vl"
    numbers = np.stack([np.asarray(frame) for frame in shown.frames]).transpose(0, 3, 1, 2)
    return video_processor(family, made.tiny.made.video)(
        videos=[torch.from_numpy(numbers)],
        video_metadata=[{"total_num_frames": len(shown.frames), "fps": shown.fps}],
        do_sample_frames=True,
        fps=2,
        return_metadata=True,
        cap_pixels_per_frame=False,
        return_tensors="pt",
    )


def plain_positions(tokens: Sequence[int], grids: list[tuple[int, int, int]], step: list[float]) -> torch.Tensor:
    """[3, T] by the rule of the models' authors: what follows lies beyond the largest position so far."""
    found: list[tuple[int, int, int]] = []
    at, place = 0, 0
    while place < len(tokens):
        if tokens[place] not in (VIDEO - 1, VIDEO):
            found.append((at, at, at))
            at, place = at + 1, place + 1
            continue
        layers, rows, columns = grids.pop(0)
        wide = step.pop(0)
        found += [
            (at + int(np.float32(t) * np.float32(wide)), at + row, at + column)
            for t in range(layers)
            for row in range(rows)
            for column in range(columns)
        ]
        place += layers * rows * columns
        at = max(max(each) for each in found) + 1
    return torch.tensor(found).T


def theirs(made: Prompts, tokens: Sequence[int], parts: Sequence[Image.Image | Video]) -> torch.Tensor:
    """transformers' logits of a prompt with pictures and videos."""
    name = type(made.tiny.oracle).__name__
    images = [part for part in parts if isinstance(part, Image.Image)]
    videos = [part for part in parts if isinstance(part, Video)]
    given: dict[str, Any] = {"input_ids": torch.tensor([list(tokens)])}
    if images:
        found = made.tiny.processor(images=images, return_tensors="pt")
        given |= {"pixel_values": found["pixel_values"], "image_grid_thw": found["image_grid_thw"]}
    clips = [processed(made, each) for each in videos]
    if clips:
        given["pixel_values_videos"] = torch.cat([each["pixel_values_videos"] for each in clips])
        given["video_grid_thw"] = torch.cat([each["video_grid_thw"] for each in clips])
    grids: list[tuple[int, int, int]] = []
    steps: list[float] = []
    left, right = iter(given.get("image_grid_thw", ())), iter(clips)
    for part in parts:
        clip = next(right) if isinstance(part, Video) else None
        layers, rows, columns = (next(left) if clip is None else clip["video_grid_thw"][0]).tolist()
        if clip is not None and "Qwen3" in name:
            grids += [(1, rows // 2, columns // 2)] * layers
            steps += [1.0] * layers
            continue
        wide = 1.0
        if clip is not None and "Qwen2_5" in name:
            per_second = made.tiny.oracle.config.vision_config.tokens_per_second
            wide = float(np.float32(per_second) * np.float32(2 / clip["video_metadata"][0].sampled_fps))
        grids.append((layers, rows // 2, columns // 2))
        steps.append(wide)
    given["position_ids"] = plain_positions(tokens, grids, steps)[:, None]
    given["mm_token_type_ids"] = torch.tensor([[{VIDEO - 1: 1, VIDEO: 2}.get(token, 0) for token in tokens]])
    with torch.no_grad():
        result: torch.Tensor = made.tiny.oracle(**given).logits[0]
    return result


def test_frames_pixels_grids_and_tokens_are_those_of_transformers(made: Prompts) -> None:
    draw = random.Random(4)
    assert made.family.video is not None
    name = type(made.tiny.oracle).__name__
    for seed in range(12):
        size = draw.randint(29, 130), draw.randint(29, 130)
        shown = video(seed, draw.randint(2, 14), draw.choice([0.7, 1.0, 2.0, 4.0, 12.5]), size)
        expected = processed(made, shown)
        found = prepare_video(shown.file(), made.family.video, VIDEOS)
        metadata, (grid,) = expected["video_metadata"][0], expected["video_grid_thw"].tolist()
        clip = Clip.of(found.layout)
        assert clip.total == len(shown.frames)
        assert clip.fps == pytest.approx(shown.fps, rel=1e-3)
        wanted = made.family.video.sample(clip.total, shown.fps, 768)
        assert list(wanted) == [int(each) for each in metadata.frames_indices]
        patch = 16 if "Qwen3" in name else 14
        assert grid == [-(-found.shape[0] // 2), found.shape[1] // patch, found.shape[2] // patch]
        ours = torch.frombuffer(bytearray(found.pixels), dtype=torch.uint8).view(*found.shape, 3)
        cut = PatchGrid(patch, 2, 2).cut(Normaliser(made.tiny.made.video, CLIP_MEAN, CLIP_STD)(ours))
        torch.testing.assert_close(cut, expected["pixel_values_videos"], atol=2e-6, rtol=0)
        text = made.family.video.expand(found.shape, Clip(clip.total, shown.fps).layout())
        assert text.count("<|video_pad|>") == grid[0] * grid[1] * grid[2] // 4
        if "Qwen3" in name:
            assert text == of_qwen3(expected, metadata, grid)


def of_qwen3(expected: Any, metadata: Any, grid: list[int]) -> str:
    """The text that transformers' Qwen3VLProcessor puts in a video's place."""
    from types import SimpleNamespace

    from transformers import Qwen3VLProcessor as Theirs

    given: Any = Theirs
    own = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
        video_token="<|video_pad|>",
        _calculate_timestamps=lambda *args: given._calculate_timestamps(None, *args),
    )
    text: str = given.replace_video_token(own, expected, 0)
    return text


def test_logits_with_videos_pictures_and_text_in_one_batch_are_transformers(made: Prompts, seeing: Any) -> None:
    driver = seeing(made.tiny.path)
    clip, long, image = video(1, 5), video(2, 12, 1.5, (60, 60)), picture(0)
    shown: list[list[Any]] = [[clip], [image, long, clip], []]
    prompts = [
        made.make("one ", clip, " and text"),
        made.make("a picture ", image, " two videos ", long, " and ", clip, " behind"),
        made.make("text alone"),
    ]
    for slot, (tokens, pictures) in enumerate(prompts):
        driver.add(slot, tokens)
        driver.show(slot, pictures)
    ours = driver.runner.logits(driver.output({slot: len(tokens) for slot, (tokens, _) in enumerate(prompts)}))
    for part, (tokens, _), parts in zip(ours.split([len(made[0]) for made in prompts]), prompts, shown, strict=True):
        assert_same_logits(part, theirs(made, tokens, parts))
    assert driver.runner.pictures.encoded == 3, "a clip that two prompts show is encoded once"


def test_chunks_that_end_within_a_video_are_transformers(made: Prompts, seeing: Any) -> None:
    driver = seeing(made.tiny.path, page_size=4)
    clip = video(3, 8, 1.0)
    tokens, pictures = made.make("before ", clip, " behind")
    tokens = [*tokens, 65, 66]
    driver.add(1, tokens)
    driver.show(1, pictures)
    first, length = pictures[0].offset, pictures[0].length
    cuts = [first + 3, length // 2, length // 3]
    cuts += [len(tokens) - sum(cuts) - 2, 1, 1]
    parts = [driver.runner.logits(driver.output({1: count})) for count in cuts]
    assert_same_logits(torch.cat(parts), theirs(made, tokens, [clip]))


def test_positions_of_short_videos_are_those_of_get_rope_index(made: Prompts, make_runner: Any) -> None:
    """Where a video reaches no further in time than in height or width, transformers' rule and the authors' agree."""
    if "Qwen3" in type(made.tiny.oracle).__name__:
        pytest.skip("each layer of a video is a picture")
    vision = make_runner(made.tiny.path, page_size=16, num_pages=64).pictures.vision
    clip = video(4, 4, 2.0, (200, 80))
    tokens, pictures = made.make("ab", clip, "c", clip, "end")
    places = [np.array([at for at, token in enumerate(tokens) if token == VIDEO])]
    half = len(places[0]) // 2
    given = processed(made, clip)
    grid = given["video_grid_thw"].repeat(2, 1)
    more = {}
    if "Qwen2_5" in type(made.tiny.oracle).__name__:
        more["second_per_grid_ts"] = torch.tensor([0.1, 0.1])
        pictures = [slower(each) for each in pictures]
    expected, _ = made.tiny.oracle.model.get_rope_index(
        torch.tensor([tokens]), torch.tensor([[2 * (token == VIDEO) for token in tokens]]), video_grid_thw=grid, **more
    )
    length = pictures[-1].end
    ours = vision.positions(length, pictures, [places[0][:half], places[0][half:]])
    assert np.array_equal(ours[:, :length], expected[:, 0, :length].numpy())


def slower(given: Picture) -> Picture:
    """The same video as if it had 20 frames a second, so that a layer takes a tenth of a second."""
    import msgspec

    return msgspec.structs.replace(given, layout=Clip(given.shape[0], 20.0).layout())


def test_a_model_without_videos_names_what_is_refused(made: Prompts, seeing: Any) -> None:
    from array import array

    from sapwood_common.errors import InvalidArgumentError

    runner = seeing(made.tiny.path).runner
    tokens, (shown,) = made.make("a ", video(1, 4), " b")
    runner.check_pictures([shown], array("I", tokens))
    for layout, says in (((1, 2), "it is no video"), ((4, 0, 0), "frames a second"), ((0, 0, 1), "it is no video")):
        odd = Picture(shown.offset, shown.length, b"", shown.shape, layout, b"")
        with pytest.raises(InvalidArgumentError, match=re.escape(says)) as caught:
            runner.check_pictures([odd], array("I", tokens))
        assert caught.value.field == "pictures[0]"
