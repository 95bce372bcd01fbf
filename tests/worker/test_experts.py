"""A real worker with a mixture of experts tells how it has spread its tokens: by gRPC, on the command line, as metrics."""

from __future__ import annotations

import json
import time
import urllib.request

import grpc
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from sapwood.cli.main import main
from sapwood.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from sapwood_common.models.model_files import packaged_path
from sapwood_testing.models.upcycled import upcycle
from sapwood_testing.worker.worker_process import started_worker

PROMPT = [3 + 7 * place % 90 for place in range(9)]


def started(model, log, *flags):
    return started_worker(model, log, "--num-pages", "64", "--no-structured-output", "--threads", "1", *flags)


@pytest.fixture
def model(tiny_model):
    """12 experts in 2 of 5 layers; a token goes to 4."""
    return tiny_model("qwen3-moe", num_attention_heads=8, num_key_value_heads=2).path


def tokens_of(address, prompt=PROMPT, count=6):
    sampling = common_pb2.SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    request = worker_pb2.WorkerGenerateRequest(request_id="a", token_ids=prompt, sampling=sampling)
    with grpc.insecure_channel(address) as channel:
        return [token for part in worker_pb2_grpc.WorkerStub(channel).Generate(request) for token in part.token_ids]


def load_of(address):
    with grpc.insecure_channel(address) as channel:
        return worker_pb2_grpc.WorkerStub(channel).GetExpertLoad(worker_pb2.GetExpertLoadRequest())


@pytest.mark.slow
def test_processes_with_whole_experts_answer_as_one_and_count_their_tokens(
    model, make_runner, make_driver, tmp_path, capsys
):
    expected = make_driver(make_runner(model)).generate({0: PROMPT}, 6)[0]
    with started(model, tmp_path / "log", "--tensor-parallel", "2", "--expert-parallel") as (address, metrics, _):
        # The scheduler tells of them right after it is ready.
        until = time.monotonic() + 60
        while not (before := load_of(address)).tokens and time.monotonic() < until:
            time.sleep(0.02)
        assert list(before.tokens) == [0] * 12
        assert before.balance == 0
        assert tokens_of(address) == expected
        after = load_of(address)
        # The last token is not computed.
        assert sum(after.tokens) == (len(PROMPT) + 5) * 4 * 2
        assert 0 < after.balance <= 1
        # Of each of the tokens in both layers with experts 48 float32 numbers go to the other rank and as many come back.
        assert after.exchanged_bytes == 2 * (len(PROMPT) + 5) * 2 * 48 * 4

        assert main(["worker", "experts", "--worker", address, "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["each"] == list(after.tokens)
        assert shown["tokens"] == sum(after.tokens)
        assert main(["worker", "experts", "--worker", address]) == 0
        assert f"experts 12, tokens {sum(after.tokens)}, balance {round(after.balance, 3)}" in capsys.readouterr().out

        with urllib.request.urlopen(metrics) as page:
            families = list(text_string_to_metric_families(page.read().decode()))
        found = {
            (sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples
        }
        assert [found["sapwood_worker_expert_tokens_total", str(expert)] for expert in range(12)] == list(after.tokens)
        assert found["sapwood_worker_expert_balance",] == after.balance
        assert found["sapwood_worker_expert_exchanged_bytes_total",] == after.exchanged_bytes
        assert not after.tiles and found["sapwood_worker_expert_tile_sizes",] == 0, "a CPU has no tiles"


@pytest.mark.slow
def test_processes_that_are_stages_count_the_tokens_of_all_layers(tiny_model, tmp_path, capsys):
    """The first stage has no experts."""
    model = tiny_model("deepseek-v3", num_hidden_layers=4, first_k_dense_replace=3).path
    with started(model, tmp_path / "log", "--pipeline-parallel", "2") as (address, metrics, _):
        tokens_of(address)
        load = load_of(address)
        # Each goes to three; the last is not computed.
        assert sum(load.tokens) == (len(PROMPT) + 5) * 3
        assert 0 < load.balance <= 1
        assert samples_of(metrics)["sapwood_worker_expert_balance"] == load.balance
        assert main(["worker", "experts", "--worker", address]) == 0
        assert f"tokens {sum(load.tokens)}, balance {round(load.balance, 3)}" in capsys.readouterr().out


def samples_of(address):
    with urllib.request.urlopen(address) as page:
        families = list(text_string_to_metric_families(page.read().decode()))
    return {sample.name: sample.value for family in families for sample in family.samples}


def answers_while_experts_move(address, prompts, count):
    """Answers one prompt after another until experts have been copied, and all prompts once more."""
    until = time.monotonic() + 120
    found = []
    while time.monotonic() < until and not (found and load_of(address).moves):
        found = [tokens_of(address, prompt, count) for prompt in prompts]
    assert load_of(address).moves, "nothing has moved"
    return [found, [tokens_of(address, prompt, count) for prompt in prompts]]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_move_experts_and_answer_as_one(model, ranks, make_runner, make_driver, tmp_path, capsys):
    prompts = [[3 + (7 + each) * place % 90 for place in range(60)] for each in range(6)]
    driver = make_driver(make_runner(model))
    expected = [driver.generate({slot: prompt}, 8)[slot] for slot, prompt in enumerate(prompts)]
    flags = "--tensor-parallel", str(ranks), "--expert-parallel", "--redundant-experts", "4", "--no-prefix-cache"
    with started(model, tmp_path / "log", *flags) as (address, metrics, _):
        for answers in answers_while_experts_move(address, prompts, 8):
            assert answers == expected
        load = load_of(address)
        assert load.ranks == ranks and 0.5 < load.rank_balance <= 1
        for layer in load.layers:
            room = len(layer.experts) // ranks
            assert len(layer.experts) == 12 + 4
            assert set(layer.experts) - {-1} == set(range(12))
            for rank in range(ranks):
                own = [each for each in layer.experts[rank * room : (rank + 1) * room] if each >= 0]
                assert len(own) == len(set(own))
        found = samples_of(metrics)
        assert found["sapwood_worker_expert_moves_total"] == load.moves
        assert found["sapwood_worker_expert_rank_balance"] == load.rank_balance
        assert main(["worker", "experts", "--worker", address]) == 0
        shown = capsys.readouterr().out
        assert (
            f"ranks {ranks}, rank_balance {round(load.rank_balance, 3)}, moves {load.moves}, exchanged_bytes " in shown
        )
        assert main(["worker", "experts", "--worker", address, "--json"]) == 0
        layers = json.loads(capsys.readouterr().out)["layers"]
        assert [[len(rank) for rank in layer] for layer in layers] == [
            [sum(each >= 0 for each in layer.experts[start : start + room]) for start in range(0, 16, room)]
            for layer in load.layers
        ]


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_demo_model_in_experts_keeps_its_text_while_they_move(ranks, plugin, make_runner, make_driver, tmp_path):
    """Experts are equal: whatever the routing and wherever they are, the text is the dense model's."""
    plugin("sapwood.model_families", "gemma3_sparse", "from sapwood_testing.models.upcycled import FAMILY", "FAMILY")
    path = tmp_path / "equal"
    upcycle(packaged_path("demo-base"), path, experts=4, chosen=2)
    prompts = [[2, 818, 5279, 529, 7001, 563], [2, *range(1000, 1150)]]
    driver = make_driver(make_runner(packaged_path("demo-base"), num_pages=256))
    expected = [driver.generate({slot: prompt}, 12)[slot] for slot, prompt in enumerate(prompts)]
    flags = "--tensor-parallel", str(ranks), "--expert-parallel", "--redundant-experts", "4", "--no-prefix-cache"
    with started(path, tmp_path / "log", *flags) as (address, _, _):
        for answers in answers_while_experts_move(address, prompts, 12):
            assert answers == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_worker_on_a_gpu_tells_what_its_tiles_go_by(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for source in ("measured", "file"):
        flags = (
            "--attention-backend",
            "triton",
            "--max-step-tokens",
            "128",
            "--max-running",
            "4",
            "--kernels",
            "tuning=3",
        )
        with started(model, tmp_path / "log", *flags) as (address, metrics, _):
            until = time.monotonic() + 60
            while not load_of(address).tokens and time.monotonic() < until:
                time.sleep(0.02)
            load = load_of(address)
            assert load.tiles == source and load.tile_sizes > 0
            assert main(["worker", "experts", "--worker", address]) == 0
            assert f"tiles {source}, tile_sizes {load.tile_sizes}" in capsys.readouterr().out
            with urllib.request.urlopen(metrics) as page:
                assert f"sapwood_worker_expert_tile_sizes {float(load.tile_sizes)}" in page.read().decode()


def test_a_model_without_experts_says_so(lend, capsys):
    address = lend().address
    assert not load_of(address).tokens
    assert main(["worker", "experts", "--worker", address]) == 0
    assert "the model has no experts" in capsys.readouterr().out
