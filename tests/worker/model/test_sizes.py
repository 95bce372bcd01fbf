"""What a worker runs at once without flags, for devices and models in use: bytes are those of the published models."""

from pathlib import Path

import pytest

from sapwood_worker.model.pools.host_pool import memory_limit
from sapwood_worker.model.sizes import DeviceFacts, Given, ModelFacts, Sizes, choose_sizes

GIB = 1 << 30
H100, H200, CARD_24 = 80 * GIB, 141 * GIB, 24 * GIB
# Bytes of the weights, and facts; keys and values in bfloat16.
QWEN_06B = (
    1.2e9,
    ModelFacts(token_bytes=28 * 8 * 128 * 4, hidden_size=1024, intermediate_size=3072, context_length=40960),
)
LLAMA_8B = (
    16.1e9,
    ModelFacts(token_bytes=32 * 8 * 128 * 4, hidden_size=4096, intermediate_size=14336, context_length=131072),
)


def llama_70b(ranks: int) -> tuple[float, ModelFacts]:
    facts = ModelFacts(
        80 * 8 * 128 * 4 / ranks, hidden_size=8192, intermediate_size=28672 // ranks, context_length=131072
    )
    return 141e9 / ranks, facts


def on_gpu(total: int, model: tuple[float, ModelFacts], given: Given | None = None) -> Sizes:
    weights, facts = model
    return choose_sizes(DeviceFacts("cuda", total, int(weights) + GIB // 2), facts, given or Given())


@pytest.mark.parametrize(
    ("total", "model", "running", "step_tokens"),
    [
        (H100, QWEN_06B, 256, 8192),
        (H200, QWEN_06B, 256, 8192),
        (CARD_24, QWEN_06B, 176, 8192),
        (H100, LLAMA_8B, 256, 8192),
        (H200, LLAMA_8B, 256, 8192),
        (CARD_24, LLAMA_8B, 40, 2048),
        (H200, llama_70b(1), 8, 512),  # the weights are as large as the card: loading fails, not this
        (H100, llama_70b(2), 32, 1024),
        (H100, llama_70b(4), 256, 8192),
        (H200, llama_70b(4), 256, 8192),
        (16 * GIB, LLAMA_8B, 8, 512),
    ],
)
def test_a_gpu_gets_what_was_measured_or_what_its_memory_holds(total, model, running, step_tokens):
    sizes = on_gpu(total, model)
    assert (sizes.max_running, sizes.max_step_tokens, sizes.cache_bytes) == (running, step_tokens, None)


@pytest.mark.parametrize("total", [CARD_24, 40 * GIB, H100, H200])
@pytest.mark.parametrize("model", [QWEN_06B, LLAMA_8B, llama_70b(4), llama_70b(8)])
def test_weights_activations_and_a_kilotoken_of_each_request_fit(total, model):
    weights, facts = model
    sizes = on_gpu(total, model)
    if sizes.max_running == 8:
        return  # the least, whether it fits or not: the trial of the largest step says so
    activations = sizes.max_step_tokens * 2 * (6 * facts.hidden_size + 4 * facts.intermediate_size)
    assert weights + activations + sizes.max_running * 1024 * facts.token_bytes < 0.9 * total


def test_what_flags_give_is_taken_and_the_rest_fits_beside_it():
    given = Given(max_running=3, max_step_tokens=100)
    sizes = on_gpu(H100, LLAMA_8B, given)
    assert (sizes.max_running, sizes.max_step_tokens) == (3, 100)
    assert "max_running 3 given" in sizes.reasons
    assert "max_step_tokens 100 given" in sizes.reasons
    small = on_gpu(H100, LLAMA_8B, Given(cache_bytes=4 * GIB))
    assert (small.max_running, small.cache_bytes) == (32, 4 * GIB)
    assert "KV cache: given" in small.reasons
    assert on_gpu(H100, LLAMA_8B, Given(cache_tokens=64 * 1024)).max_running == 64
    large = on_gpu(H100, LLAMA_8B, Given(cache_bytes=54 * GIB))
    assert large.max_step_tokens < 8192  # the cache leaves little for a step
    assert on_gpu(H100, LLAMA_8B, Given(memory_fraction=0.3)).max_running < 64


def test_a_short_context_needs_less_cache_for_each_request():
    weights, facts = LLAMA_8B
    short = ModelFacts(facts.token_bytes, facts.hidden_size, facts.intermediate_size, context_length=256)
    assert on_gpu(CARD_24, (weights, short)).max_running == 168


def test_reasons_name_each_choice_and_what_it_goes_by():
    running, step, cache = on_gpu(CARD_24, LLAMA_8B).reasons
    assert running == "max_running 40: the cache holds 1024 tokens of about 43 requests"
    assert step.startswith("max_step_tokens 2048: its activations take 0.6 GiB of the ")
    assert cache == "KV cache: what the largest step leaves of 90% of 24.0 GiB"
    running, step, _ = on_gpu(H200, LLAMA_8B).reasons
    assert running.startswith("max_running 256: the most that was measured; the cache holds 1024 tokens of about ")
    assert step == "max_step_tokens 8192: the most that was measured"


@pytest.mark.parametrize(
    ("memory", "cache", "why"),
    [(24 * GIB, GIB, "the usual on a CPU"), (4 * GIB, GIB // 2, "an eighth of the 4.0 GiB there are")],
)
def test_a_cpu_keeps_its_defaults_and_takes_an_eighth_of_a_small_container(memory, cache, why):
    sizes = choose_sizes(DeviceFacts("cpu", memory), QWEN_06B[1], Given())
    assert (sizes.max_running, sizes.max_step_tokens, sizes.cache_bytes) == (64, 512, cache)
    assert sizes.reasons[2].endswith(why)


def test_a_cpus_flags_are_taken():
    sizes = choose_sizes(DeviceFacts("cpu", 24 * GIB), QWEN_06B[1], Given(8, 100, cache_tokens=4096))
    assert (sizes.max_running, sizes.max_step_tokens, sizes.cache_bytes) == (8, 100, None)


def test_the_memory_limit_is_the_control_groups_where_that_is_less(tmp_path: Path):
    machine = memory_limit(tmp_path)
    assert machine > GIB // 4
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_limit(tmp_path) == machine
    (tmp_path / "memory.max").write_text("134217728\n")
    assert memory_limit(tmp_path) == 134217728
    (tmp_path / "memory.max").write_text(f"{1 << 60}\n")
    assert memory_limit(tmp_path) == machine
