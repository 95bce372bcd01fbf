"""Models of the Hugging Face hub: fetched from a server that speaks its protocol, with the hub's own library."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from sapwood_common.errors import ConfigError
from sapwood_common.models.hub import Hub, HubName, parse_hub_name
from sapwood_testing.models.hub_server import HubServer, Repo

from .conftest import DESCRIPTION, WEIGHTS

TINY = HubName("someone/tiny")


def files_in(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


def refusal(hub: Hub, name: HubName = TINY, revision: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        hub.find(name, revision)
    said = str(caught.value)
    assert "\n" not in said
    assert said.startswith("--model: ")
    return said


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B")),
        ("a/b-GGUF:b-Q4_K_M.gguf", HubName("a/b-GGUF", "b-Q4_K_M.gguf")),
        ("a/b:folder/c.gguf", HubName("a/b", "folder/c.gguf")),
        ("gpt2", None),
        ("models/x.gguf", None),
        ("/models/x", None),
        ("./a/b", None),
        ("a/b/c", None),
        ("a/b:Q4_K_M", HubName("a/b", "Q4_K_M")),
        ("a/b:", None),
        ("~/models", None),
    ],
)
def test_a_name_is_owner_and_name_and_maybe_a_file(text: str, meant: HubName | None) -> None:
    assert parse_hub_name(text) == meant


def test_only_what_worker_and_tokenizer_read_is_fetched(hub_server: HubServer, cache: Path) -> None:
    told: list[tuple[str, int, int]] = []
    found = Hub(hub_server.url, cache).find(TINY, progress=lambda *step: told.append(step))
    assert files_in(found.path) == DESCRIPTION.keys() | WEIGHTS.keys()
    for name, content in (DESCRIPTION | WEIGHTS).items():
        assert (found.path / name).read_bytes() == content
    assert hub_server.sent_bytes == 6_000_000
    assert {(text, total) for text, _, total in told} == {("fetching someone/tiny", 6_000_000)}
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    assert told[-1][1] == 6_000_000


def test_a_tokenizer_needs_no_weights_and_a_worker_fetches_the_rest(hub_server: HubServer, cache: Path) -> None:
    hub = Hub(hub_server.url, cache)
    found = hub.find(TINY, weights=False)
    assert files_in(found.path) == DESCRIPTION.keys()
    assert hub_server.sent_bytes == 0
    assert hub.find(TINY) == found
    assert hub_server.sent_bytes == 6_000_000


def test_what_is_there_is_not_fetched_again_nor_needs_the_hub(hub_server: HubServer, cache: Path) -> None:
    found = Hub(hub_server.url, cache).find(TINY)
    hub_server.requests.clear()
    assert Hub(hub_server.url, cache).find(TINY) == found
    assert not hub_server.asked("GET", "/resolve/") and not hub_server.asked("GET", "/lfs/")
    hub_server.requests.clear()
    assert Hub(hub_server.url, cache).find(TINY, found.commit) == found
    assert Hub(hub_server.url, cache, may_fetch=False).find(TINY) == found
    assert hub_server.requests == []
    hub_server.failing = 503
    assert Hub(hub_server.url, cache).find(TINY) == found
    assert Hub("http://127.0.0.1:9", cache).find(TINY) == found


def test_a_hub_that_does_not_answer_is_not_waited_for(hub_server: HubServer, cache: Path) -> None:
    hub_server.answers.clear()
    hub = Hub(hub_server.url, cache, patience=0.2)
    said = refusal(hub)
    assert (
        f"someone/tiny is not wholly in the cache at {cache}, and {hub_server.url} cannot be reached (timed out)"
        in said
    )
    hub_server.answers.set()
    found = Hub(hub_server.url, cache).find(TINY)
    hub_server.answers.clear()
    assert hub.find(TINY) == found


def test_a_download_that_is_cut_goes_on_where_it_was(hub_server: HubServer, cache: Path) -> None:
    piece = 10 << 20  # the library writes whole pieces of this size to the disk; of what came after them it asks again
    weights = bytes(range(256)) * (12 << 12)
    hub_server.repos["someone/tiny"].commit({"config.json": b"{}", "model.safetensors": weights})
    hub_server.cuts = [piece + 1_000_000]
    found = Hub(hub_server.url, cache).find(TINY)
    assert (found.path / "model.safetensors").read_bytes() == weights
    assert [request.range for request in hub_server.asked("GET", "/lfs/")] == ["", f"bytes={piece}-"]
    assert hub_server.sent_bytes == len(weights) + 1_000_000


def test_files_that_are_whole_are_kept_when_fetching_fails(hub_server: HubServer, cache: Path) -> None:
    first, second = (hashlib.sha256(content).hexdigest() for content in WEIGHTS.values())
    hub_server.lost = {second}
    assert "answered 500 Internal Server Error: try again later" in refusal(Hub(hub_server.url, cache))
    assert hub_server.sent == {first: 3_000_000}
    hub_server.lost = set()
    assert Hub(hub_server.url, cache).find(TINY)
    assert hub_server.sent == {first: 3_000_000, second: 3_000_000}


@pytest.mark.slow  # the library waits a second before each of its tries
def test_a_connection_that_breaks_again_and_again_is_named(hub_server: HubServer, cache: Path) -> None:
    hub_server.cuts = [0] * 6
    said = refusal(Hub(hub_server.url, cache))
    assert "someone/tiny: the connection to" in said and "try again; files that are whole are kept" in said
    assert len(hub_server.asked("GET", "/lfs/")) == 6


@pytest.mark.parametrize("by", ["branch", "tag/with-a-slash", "commit"])
def test_a_revision_is_a_branch_a_tag_or_a_commit(hub_server: HubServer, cache: Path, by: str) -> None:
    changed = {"config.json": b'{"changed": true}', "model.safetensors": b"other weights"}
    commit = hub_server.repos["someone/tiny"].commit(changed, ref="branch" if by == "commit" else by)
    found = Hub(hub_server.url, cache).find(TINY, commit if by == "commit" else by)
    assert found.commit == commit
    assert files_in(found.path) == changed.keys()


def test_one_gguf_file_of_many_is_fetched(hub_server: HubServer, cache: Path) -> None:
    repo = hub_server.repos["someone/many"] = Repo()
    commit = repo.commit({"a-Q8_0.gguf": b"8" * 2_000_000, "a-Q4_0.gguf": b"4" * 1_000_000, "README.md": b""})
    told: list[tuple[str, int, int]] = []
    name = HubName("someone/many", "a-Q4_0.gguf")
    found = Hub(hub_server.url, cache).find(name, progress=lambda *step: told.append(step))
    assert (found.path.name, found.commit) == ("a-Q4_0.gguf", commit)
    assert found.path.read_bytes() == b"4" * 1_000_000
    assert hub_server.sent_bytes == 1_000_000
    assert told[-1] == ("fetching someone/many:a-Q4_0.gguf", 1_000_000, 1_000_000)
    hub_server.requests.clear()
    assert Hub(hub_server.url, cache).find(name, commit) == found
    assert hub_server.requests == []
    said = refusal(Hub(hub_server.url, cache), HubName("someone/many"))
    assert "name one: someone/many:a-Q4_0.gguf, someone/many:a-Q8_0.gguf" in said
    said = refusal(Hub(hub_server.url, cache), HubName("someone/many", "a-Q2_K.gguf"))
    assert said == (
        "--model: someone/many has no file 'a-Q2_K.gguf'; name one: someone/many:a-Q4_0.gguf, someone/many:a-Q8_0.gguf"
    )


def test_all_gguf_files_of_a_model_in_several_are_fetched(hub_server: HubServer, cache: Path) -> None:
    repo = hub_server.repos["someone/many"] = Repo()
    parts = {f"Q4/a-Q4_K_M-0000{number}-of-00003.gguf": bytes([number]) * 5 for number in (1, 2, 3)}
    repo.commit({**parts, "a-Q8_0.gguf": b"8"})
    for meant in ("Q4_K_M", "Q4/a-Q4_K_M-00002-of-00003.gguf"):
        found = Hub(hub_server.url, cache).find(HubName("someone/many", meant))
        assert found.path.name == "a-Q4_K_M-00001-of-00003.gguf"
        assert {f"Q4/{file.name}": file.read_bytes() for file in found.path.parent.iterdir()} == parts


def test_a_part_of_a_gguf_files_name_is_enough_if_one_file_has_it(hub_server: HubServer, cache: Path) -> None:
    repo = hub_server.repos["someone/many"] = Repo()
    repo.commit({"a-Q4_K_M.gguf": b"m", "a-Q4_K_S.gguf": b"s", "a-F16.gguf": b"f"})
    hub = Hub(hub_server.url, cache)
    found = hub.find(HubName("someone/many", "q4_k_m"))
    assert found.path.read_bytes() == b"m"
    hub_server.requests.clear()
    assert hub.find(HubName("someone/many", "q4_k_m"), found.commit) == found
    assert Hub(hub_server.url, cache, may_fetch=False).find(HubName("someone/many", "Q4_K_M")) == found
    assert hub_server.requests == []
    assert "has 2 .gguf files with 'Q4_K' in their names; name one: " in refusal(hub, HubName("someone/many", "Q4_K"))
    assert "someone/tiny has no file 'Q4_K'; it has no .gguf file" in refusal(hub, HubName("someone/tiny", "Q4_K"))
    repo.claimed = {"a-F16.gguf": 10**17}
    repo.commit({"a-F16.gguf": b"g"})
    assert "someone/many:F16 needs 100000000000 MB under" in refusal(hub, HubName("someone/many", "F16"))


def test_a_gated_model_needs_a_token_that_is_admitted(
    hub_server: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_server.repos["someone/tiny"].gated = True
    hub_server.tokens = {"hf_mine", "hf_other"}
    hub_server.repos["someone/tiny"].admitted = {"hf_mine"}
    monkeypatch.delenv("HF_TOKEN", raising=False)
    hub = Hub(hub_server.url, cache)
    page = f"accept its terms at {hub_server.url}/someone/tiny"
    assert refusal(hub) == f"--model: someone/tiny is gated: {page}, then set HF_TOKEN to a token of yours"
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    assert f"the token has no access to it: {page}" in refusal(hub)
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    assert files_in(hub.find(TINY).path) == DESCRIPTION.keys() | WEIGHTS.keys()
    assert {request.token for request in hub_server.asked("GET", "/lfs/")} == {""}, "another host gets no token"


def test_a_private_or_unknown_model_is_named_with_what_to_check(
    hub_server: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_server.repos["someone/tiny"].private = True
    hub_server.tokens = {"hf_mine"}
    monkeypatch.delenv("HF_TOKEN", raising=False)
    hub = Hub(hub_server.url, cache)
    for name in ("someone/tiny", "someone/tinny"):
        assert refusal(hub, HubName(name)) == (
            f"--model: '{name}' is neither a file or folder here nor a model of {hub_server.url}: check the spelling, or, if it "
            "is private, set HF_TOKEN"
        )
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    assert "take a token that may read it" in refusal(hub, HubName("someone/tinny"))
    assert hub.find(TINY, weights=False)
    monkeypatch.setenv("HF_TOKEN", "hf_typo")
    assert "does not know the token: set HF_TOKEN to a valid one" in refusal(hub, HubName("someone/tinny"))


def test_what_cannot_be_fetched_is_one_line_that_says_what_to_do(
    hub_server: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(hub_server.url, cache)
    assert "has no branch, tag or commit 'v9' (--revision)" in refusal(hub, revision="v9")
    assert "someone/tiny is not wholly in the cache at" in refusal(Hub(hub_server.url, cache, may_fetch=False))
    said = refusal(Hub("http://127.0.0.1:9", cache))
    assert "http://127.0.0.1:9 cannot be reached" in said and "HTTPS_PROXY" in said
    hub_server.failing = 503
    assert f"{hub_server.url} answered 503 Service Unavailable: try again later" in refusal(hub)
    hub_server.failing = 429
    assert "has had too many requests: wait, or set HF_TOKEN" in refusal(hub)
    hub_server.failing = None
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # the library reads the variable once
    assert "HF_HUB_OFFLINE forbids to fetch it" in refusal(hub)


def test_a_model_without_config_or_safetensors_is_refused(hub_server: HubServer, cache: Path) -> None:
    hub_server.repos["someone/odd"] = Repo()
    hub_server.repos["someone/odd"].commit({"README.md": b"", "model.onnx": b"x"})
    hub = Hub(hub_server.url, cache)
    assert "holds no config.json" in refusal(hub, HubName("someone/odd"))
    hub_server.repos["someone/odd"].commit({"config.json": b"{}", "model.onnx": b"x"})
    assert "has no model.safetensors: weights are read from safetensors" in refusal(hub, HubName("someone/odd"))
    index = {"config.json": b"{}", "model.safetensors.index.json": b"not json"}
    hub_server.repos["someone/odd"].commit(index)
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json: cannot be read"):
        hub.find(HubName("someone/odd"))


@pytest.mark.parametrize(
    ("there", "fetched"),
    [
        ({"pytorch_model.bin": b"w", "colbert_linear.pt": b"x"}, {"pytorch_model.bin"}),
        ({"pytorch_model.bin": b"w", "model.safetensors": b"s"}, {"model.safetensors"}),
        (
            {
                "pytorch_model.bin.index.json": b'{"weight_map": {"a": "one.bin", "b": "two.bin"}}',
                "one.bin": b"1",
                "two.bin": b"2",
            },
            {"pytorch_model.bin.index.json", "one.bin", "two.bin"},
        ),
    ],
)
def test_a_model_without_safetensors_is_fetched_in_torchs_format(
    hub_server: HubServer, cache: Path, there: dict[str, bytes], fetched: set[str]
) -> None:
    hub_server.repos["someone/old"] = Repo()
    hub_server.repos["someone/old"].commit({"config.json": b"{}", **there})
    found = Hub(hub_server.url, cache).find(HubName("someone/old"))
    assert files_in(found.path) == {"config.json", *fetched}


def test_more_than_the_disk_holds_is_refused_before_it_is_fetched(hub_server: HubServer, cache: Path) -> None:
    hub_server.repos["someone/tiny"].claimed = dict.fromkeys(WEIGHTS, 10**17)
    said = refusal(Hub(hub_server.url, cache))
    assert "someone/tiny needs 200000000000 MB under" in said
    assert "are free (HF_HOME chooses another place)" in said
    assert hub_server.sent_bytes == 0
