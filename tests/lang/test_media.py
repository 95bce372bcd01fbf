"""Pictures and videos in turns."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

import sapwood.lang as sl
from sapwood.lang.backends.base import Ability
from sapwood.lang.media import clip, picture

PNG = b"\x89PNG\r\n\x1a\nrest"


def test_a_picture_becomes_a_url_that_holds_it(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    url = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    assert picture(PNG) == picture(str(tmp_path / "a.png")) == picture(url) == url
    assert picture("https://example.org/a.jpg") == "https://example.org/a.jpg"
    with pytest.raises(ValueError, match="not a PNG"):
        picture(b"text")
    with pytest.raises(OSError, match="none"):
        picture(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (b"\0\0\0\x18ftypmp42", "video/mp4"),
        (b"\x1aE\xdf\xa3rest", "video/webm"),
        (b"RIFF\0\0\0\0AVI LIST", "video/x-msvideo"),
        (b"RIFF\0\0\0\0WEBPVP8X", "image/webp"),
        (PNG, "image/png"),
    ],
)
def test_a_video_becomes_a_url_of_its_kind(tmp_path: Path, raw: bytes, kind: str) -> None:
    (tmp_path / "clip").write_bytes(raw)
    assert clip(raw) == clip(str(tmp_path / "clip")) == f"data:{kind};base64,{base64.b64encode(raw).decode()}"


def test_what_is_no_video_and_a_number_of_frames_are_refused() -> None:
    with pytest.raises(ValueError, match="video: not an MP4"):
        clip(b"text")
    with pytest.raises(ValueError, match="num_frames"):
        sl.video("a.mp4", 4)


def test_turns_with_pictures_have_parts_in_order(make_backend: Any) -> None:
    prompts: list[Any] = []

    class Seeing(make_backend):  # type: ignore[misc]
        abilities = make_backend.abilities | {Ability.IMAGE}

        async def generate(self, prompt: Any, options: Any) -> Any:
            prompts.append(prompt)
            return await super().generate(prompt, options)

    @sl.function
    def program(s: sl.State) -> None:
        s += sl.user("Look: " + sl.image(PNG) + " and say what it is.") + sl.assistant(sl.gen("x"))

    program.run(backend=Seeing(None))
    ((turn,),) = [prompt.messages for prompt in prompts]
    assert [part["type"] for part in turn["content"]] == ["text", "image_url", "text"]
    assert [part.get("text") for part in turn["content"]] == ["Look: ", None, " and say what it is."]
    assert turn["content"][1]["image_url"]["url"].startswith("data:image/png;base64,")
