"""Pictures through a whole cluster, from each API's own client: greedy text is transformers', no two pictures are confused."""

from __future__ import annotations

import base64
import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest
import torch
from PIL import Image

import sapwood.lang as sl
from sapwood.client import Client
from sapwood_testing.models.video_processor import video_processor
from sapwood_testing.models.vision_models import TinyVision, make_vision
from sapwood_testing.models.vision_prompts import Video

COUNT = 8
pytestmark = pytest.mark.slow


def picture(seed: int) -> tuple[Image.Image, bytes]:
    """A picture and its PNG file; all have one size, so that prompts with them have the same tokens."""
    image = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (150, 210, 3), dtype=np.uint8))
    file = io.BytesIO()
    image.save(file, "PNG")
    return image, file.getvalue()


def url(file: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


def message(*parts: str | bytes) -> list[dict[str, Any]]:
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": url(part)}}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyVision:
    return make_vision("qwen2_5_vl", tmp_path_factory.mktemp("seeing") / "seeing")


@pytest.fixture(scope="module")
def cluster(tiny: TinyVision, start_cluster_of: Any) -> Iterator[Any]:
    flags = ("--worker-dtype", "float32", "--worker-num-pages", "64", "--worker-max-step-tokens", "32")
    flags += ("--router-max-body-bytes", "16777216,pictures=350000")
    with start_cluster_of(str(tiny.path), "--workers", "1", *flags) as running:
        yield running


def asked(cluster: Any, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": COUNT, "temperature": 0, "return_token_ids": True, **more}
    answer = httpx.post(f"http://{cluster.http}/v1/chat/completions", json=body, timeout=100, trust_env=False)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def check(tiny: TinyVision, found: dict[str, Any], images: list[Image.Image]) -> None:
    prompt, answer = found["prompt_token_ids"], found["choices"][0]["token_ids"]
    assert found["usage"]["prompt_tokens"] == len(prompt)
    assert answer == tiny.greedy(prompt, images, len(answer))


def test_text_is_transformers_for_pictures_alone_together_and_cached(cluster: Any, tiny: TinyVision) -> None:
    (one, one_file), (other, other_file) = picture(0), picture(1)
    first = asked(cluster, message("What is this? ", one_file, "? Say."))
    check(tiny, first, [one])
    assert first["prompt_token_ids"].count(tiny.image) == 40
    second = asked(cluster, message("What is this? ", other_file, "? Say."))
    assert second["prompt_token_ids"] == first["prompt_token_ids"], "the same tokens for another picture"
    check(tiny, second, [other])
    before = first["prompt_token_ids"].index(tiny.image)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == before, "the text before the picture"
    again = asked(cluster, message("What is this? ", one_file, "? Tell."))
    check(tiny, again, [one])
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
    check(tiny, asked(cluster, message("Which? ", one_file, other_file, one_file)), [one, other, one])
    check(tiny, asked(cluster, message("No picture at all.")), [])


def test_pictures_of_running_requests_have_a_bound_and_leave_nothing(cluster: Any) -> None:
    files = [picture(seed)[1] for seed in range(10, 14)]
    body = {"messages": message(*files, "What?"), "max_tokens": 1}
    answer = httpx.post(f"http://{cluster.http}/v1/chat/completions", json=body, timeout=100, trust_env=False)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1"), answer.text
    assert "pictures of running requests take 0 of 350000 bytes" in answer.json()["error"]["message"]
    for _ in range(5):
        asked(cluster, message(*files[:3], "What?"))


def test_tenants_share_no_page_of_a_picture(cluster: Any, tiny: TinyVision) -> None:
    image, file = picture(2)
    for salt, known in (("a", False), ("b", False), ("a", True)):
        found = asked(cluster, message("Whose is it? ", file, "? Mine."), cache_salt=salt)
        assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == (
            len(found["prompt_token_ids"]) - 1 if known else 0
        )
        check(tiny, found, [image])


def test_each_apis_own_client_gets_the_same_answer_for_a_picture(
    cluster: Any, tiny: TinyVision, tmp_path: Path
) -> None:
    file = picture(3)[1]
    encoded = base64.b64encode(file).decode()
    expected = asked(cluster, message(file, "What?"))["choices"][0]["message"]["content"]
    base = f"http://{cluster.http}"
    chat = openai.OpenAI(base_url=f"{base}/v1", api_key="none")
    parts: Any = message(file, "What?")
    made = chat.chat.completions.create(model="seeing", messages=parts, max_tokens=COUNT, temperature=0)
    assert made.choices[0].message.content == expected
    shown: Any = [{"type": "input_image", "image_url": url(file)}, {"type": "input_text", "text": "What?"}]
    response = chat.responses.create(
        model="seeing", input=[{"role": "user", "content": shown}], max_output_tokens=COUNT, temperature=0, store=False
    )
    assert response.output_text == expected
    source: Any = {"type": "base64", "media_type": "image/png", "data": encoded}
    blocks: Any = [{"type": "image", "source": source}, {"type": "text", "text": "What?"}]
    told = anthropic.Anthropic(base_url=base, api_key="none").messages.create(
        model="seeing", max_tokens=COUNT, extra_body={"temperature": 0}, messages=[{"role": "user", "content": blocks}]
    )
    assert [block.text for block in told.content if block.type == "text"] == [expected]
    asked_ollama = {
        "model": "seeing", "stream": False, "options": {"num_predict": COUNT, "temperature": 0},
        "messages": [{"role": "user", "content": "What?", "images": [encoded]}],
    }  # fmt: skip
    ollama = httpx.post(f"{base}/api/chat", json=asked_ollama, timeout=100, trust_env=False)
    assert ollama.json()["message"]["content"] == expected
    with Client(cluster.grpc) as client:
        given = [{"type": "image", "image": file}, {"type": "text", "text": "What?"}]
        turns = [{"role": "user", "content": given}]
        assert client.generate(messages=turns, max_tokens=COUNT, temperature=0.0).text() == expected
    rendered = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What?<|im_end|>\n<|im_start|>assistant\n"
    sampling = {"max_new_tokens": COUNT, "temperature": 0}
    for image in (encoded, url(file), [{"url": url(file)}]):
        native = {"text": rendered, "image_data": image, "sampling_params": sampling}
        assert httpx.post(f"{base}/generate", json=native, timeout=100, trust_env=False).json()["text"] == expected
    (tmp_path / "picture.png").write_bytes(file)
    command = [
        sys.executable,
        "-m",
        "sapwood.cli.main",
        "generate",
        "--address",
        cluster.grpc,
        "--max-tokens",
        str(COUNT),
    ]
    command += ["--temperature", "0", "--image", str(tmp_path / "picture.png"), "What?"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == f"{expected}\n"


@pytest.mark.parametrize(
    ("parts", "param", "says"),
    [
        ([b"no picture"], "messages[0].content[0]", "no picture of a kind"),
        ([picture(0)[1][:200]], "messages[0].content[0]", "damaged"),
        (["<|image_pad|>", picture(0)[1]], "messages", "shows 2 pictures of 1"),
    ],
)
def test_what_is_no_picture_is_a_400_that_names_the_part(cluster: Any, parts: list[Any], param: str, says: str) -> None:
    body = {"messages": message(*parts), "max_tokens": 1}
    answer = httpx.post(f"http://{cluster.http}/v1/chat/completions", json=body, timeout=100, trust_env=False)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert says in answer.json()["error"]["message"]


def test_a_video_gets_transformers_text_from_two_apis_and_is_found_again(cluster: Any, tiny: TinyVision) -> None:
    clip = Video([picture(20 + index)[0].resize((60, 60)) for index in range(8)], 2.0)
    link = f"data:image/png;base64,{base64.b64encode(clip.file()).decode()}"
    parts = [{"type": "video_url", "video_url": {"url": link}}, {"type": "text", "text": "What happens?"}]
    found = asked(cluster, [{"role": "user", "content": parts}])
    prompt, answer = found["prompt_token_ids"], found["choices"][0]["token_ids"]
    assert prompt.count(tiny.image + 1) == 4 * 4
    made = video_processor("qwen2_vl", tiny.made.video)(
        videos=[torch.from_numpy(np.stack([np.asarray(each) for each in clip.frames]).transpose(0, 3, 1, 2))],
        video_metadata=[{"total_num_frames": 8, "fps": 2.0}],
        do_sample_frames=True,
        fps=2,
        return_tensors="pt",
    )
    known = list(prompt)
    for token in answer:
        types = torch.tensor([[2 * (each == tiny.image + 1) for each in known]])
        layers = torch.arange(4).repeat_interleave(4) * tiny.oracle.config.vision_config.tokens_per_second
        first = known.index(tiny.image + 1)
        seen = torch.stack((layers, torch.tensor([0, 0, 1, 1] * 4), torch.tensor([0, 1, 0, 1] * 4))) + first
        after = torch.arange(len(known) - first - 16).expand(3, -1) + int(seen.max()) + 1
        positions = torch.cat((torch.arange(first).expand(3, -1), seen, after), 1)[:, None]
        with torch.no_grad():
            logits = tiny.oracle(
                input_ids=torch.tensor([known]), position_ids=positions, mm_token_type_ids=types, **made
            ).logits
        assert int(logits[0, -1].argmax()) == token
        known.append(token)
    with Client(cluster.grpc) as client:
        shown = [{"type": "video", "video": clip.file()}, {"type": "text", "text": "What happens?"}]
        with client.generate(
            messages=[{"role": "user", "content": shown}], max_tokens=COUNT, temperature=0.0
        ) as generation:
            assert generation.text() == found["choices"][0]["message"]["content"]
    again = asked(cluster, [{"role": "user", "content": parts}])
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16
    assert again["choices"][0]["token_ids"] == answer


def test_a_program_shows_a_video_over_grpc_http_and_openais_library(cluster: Any, tmp_path: Path) -> None:
    clip = Video([picture(20 + index)[0].resize((60, 60)) for index in range(8)], 2.0)
    (tmp_path / "clip.png").write_bytes(clip.file())
    link = f"data:image/png;base64,{base64.b64encode(clip.file()).decode()}"
    parts = [{"type": "video_url", "video_url": {"url": link}}, {"type": "text", "text": "What happens?"}]
    by_hand = asked(cluster, [{"role": "user", "content": parts}])["choices"][0]["message"]["content"]

    @sl.function
    def program(s: sl.State, source: str | bytes) -> None:
        s += sl.user(sl.video(source) + "What happens?") + sl.assistant(sl.gen("x", COUNT, temperature=0))

    url = f"http://{cluster.http}"
    model = openai.OpenAI(base_url=f"{url}/v1", api_key="none").models.list().data[0].id
    for backend in (
        sl.Sapwood(cluster.grpc),
        sl.SapwoodHttp(url),
        sl.OpenAI(model, base_url=f"{url}/v1", api_key="none", extras=True),
    ):
        with backend:
            for source in (clip.file(), str(tmp_path / "clip.png")):
                assert program.run(source, backend=backend)["x"] == by_hand
    with pytest.raises(sl.UnsupportedError, match="videos"):
        program.run(clip.file(), backend=sl.OpenAI(model, base_url=f"{url}/v1", api_key="none"))


def test_a_program_commits_a_turn_with_a_picture(cluster: Any) -> None:
    _, file = picture(40)
    by_hand = asked(cluster, message(file, "What is it?"))["choices"][0]["message"]["content"]

    @sl.function
    def program(s: sl.State) -> None:
        s += sl.user(sl.image(file) + "What is it?")
        s.commit()
        s += sl.assistant(sl.gen("x", COUNT, temperature=0))

    for backend in (sl.Sapwood(cluster.grpc), sl.SapwoodHttp(f"http://{cluster.http}")):
        with backend:
            state = program.run(backend=backend)
        assert state["x"] == by_hand
        committed, generated = [event.usage for event in state.record.events if event.usage.requests]
        assert committed.prompt_tokens - 16 <= generated.cached_tokens  # a turn's end is not part of what was computed


def test_urls_other_than_data_are_refused_unless_hosts_are_named(cluster: Any) -> None:
    for link in ("https://example.com/a.png", "http://127.0.0.1/", "file:///etc/passwd", "/etc/passwd"):
        body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": link}}]}]}
        answer = httpx.post(f"http://{cluster.http}/v1/chat/completions", json=body, timeout=100, trust_env=False)
        assert answer.status_code == 400
        assert "data:" in answer.json()["error"]["message"]


def test_a_prompt_with_pictures_is_handed_from_worker_to_worker(tiny: TinyVision, start_cluster_of: Any) -> None:
    flags = ("--roles", "prefill,decode", "--router-disaggregate", "always", "--worker-num-pages", "128")
    with start_cluster_of(str(tiny.path), "--worker-dtype", "float32", *flags) as running:
        for seed in (0, 1, 0):
            image, file = picture(seed)
            check(tiny, asked(running, message("What is this? ", file, "? Say.")), [image])
        metrics = httpx.get(f"http://{running.http}/metrics", timeout=100, trust_env=False).text
        handed = [line for line in metrics.splitlines() if line.startswith("sapwood_router_kv_transfers_total")]
        assert any(float(line.split()[-1]) > 0 for line in handed), handed or metrics
