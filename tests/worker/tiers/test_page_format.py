"""Pages that another version wrote: read where they hold what ours hold, and never where they do not."""

from __future__ import annotations

import json
import os
import shutil
import time
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from sapwood_common.contract.sampling import SamplingParams
from sapwood_testing.worker.model_scheduler import scheduler_for
from sapwood_worker.core.cache.hierarchical import HierarchicalCache
from sapwood_worker.core.cache.host import HostPages
from sapwood_worker.core.cache.page_key import PageChain
from sapwood_worker.core.cache.storage import record
from sapwood_worker.core.cache.storage.file import FileStorage
from sapwood_worker.core.cache.storage.opener import StorageFacts, open_connection
from sapwood_worker.core.cache.storage.tier import PrefetchOptions, StorageTier
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.model.pools.host_pool import HEADER_BYTES

FIXTURES = Path(__file__).parent / "page_formats"
PAGE, PAGES, HIDDEN, HEADS, DIM, MIDDLE, VOCAB = 4, 28, 16, 2, 8, 24, 97
PROMPT = [3 + 7 * place % 90 for place in range(2 * PAGE + 1)]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": MIDDLE,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": DIM,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights are computed, so that no generator of random numbers decides what its pages hold."""
    folder = tmp_path_factory.mktemp("formula")
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(2):
        inner = f"model.layers.{layer}."
        shapes |= {inner + f"self_attn.{name}_proj.weight": (HEADS * DIM, HIDDEN) for name in "qkv"}
        shapes |= {inner + "self_attn.o_proj.weight": (HIDDEN, HEADS * DIM)}
        shapes |= {inner + f"mlp.{name}_proj.weight": (MIDDLE, HIDDEN) for name in ("gate", "up")}
        shapes |= {inner + "mlp.down_proj.weight": (HIDDEN, MIDDLE)}
        shapes |= {inner + f"{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    tensors = {}
    for number, (name, shape) in enumerate(sorted(shapes.items())):
        places = torch.arange(int(np.prod(shape)), dtype=torch.float64)
        values = torch.sin(places * 1.7 + number) * 0.4 + (1.0 if "norm" in name else 0.0)
        tensors[name] = values.reshape(shape).to(torch.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


class Life:
    """A worker with a store of files, that answers one prompt."""

    def __init__(self, runner: Any, folder: Path) -> None:
        host = HostPages(runner.host_pool.num_pages)
        options = PrefetchOptions(policy="wait_complete", share=1.0)
        self.storage = StorageTier(host, runner.host_pool, PAGE, options, time.monotonic)
        facts = StorageFacts(runner.host_pool, PAGE, runner.cache_identity, 1.0, min_tokens=1)
        self.storage.attach(open_connection(FileStorage(folder, 1 << 30), facts, time.monotonic))
        tiers = HierarchicalCache(host, PAGES, PAGE, "write_through", self.storage)
        settings = {"page_size": PAGE, "num_pages": PAGES, "max_running": 3, "max_step_tokens": 24}
        scheduler = scheduler_for(runner.info, tiers, prefix_cache=True, conservativeness=0.0, **settings)
        sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        scheduler.add(Request(0, "r", array("I", PROMPT), sampling))
        self.tokens: list[int] = []
        while scheduler.has_work or scheduler.has_copies or self.storage.busy:
            planned = scheduler.schedule()
            if not planned:
                scheduler.wait_for_storage(0.01)
                continue
            for output in scheduler.update(runner.execute(planned)):
                self.tokens += output.token_ids
        self.fetched, self.rejected = self.storage.counters.fetched, self.storage.counters.rejected


@pytest.fixture
def live(model: Path, make_runner: Any, tmp_path: Path) -> Any:
    """Starts one, on the store of all that this starts."""

    def start() -> Life:
        runner = make_runner(model, page_size=PAGE, num_pages=PAGES, max_running=3, host_cache_ratio=2.0)
        return Life(runner, tmp_path)

    return start


def stored_pages(folder: Path) -> list[bytes]:
    """The content of the prompt's pages in a store, in their order."""
    keys = PageChain(b"", PAGE)
    keys.extend(array("I", PROMPT), 2 * PAGE)
    found = {path.name: path for path in folder.rglob("*") if path.is_file()}
    return [found[page.key.hash.hex()].read_bytes()[HEADER_BYTES:] for page in keys.pages]


def test_pages_hold_what_pages_of_their_format_have_always_held(live: Any, tmp_path: Path) -> None:
    """Fails where a page's bytes mean something else than before: count ``PAGE_FORMAT`` up, and record the new ones with
    ``SAPWOOD_RECORD=1``."""
    live()
    pages = np.stack([np.frombuffer(page, np.float32) for page in stored_pages(tmp_path)])
    path = FIXTURES / f"{record.PAGE_FORMAT}.npy"
    if os.environ.get("SAPWOOD_RECORD"):
        path.parent.mkdir(exist_ok=True)
        np.save(path, pages)
    np.testing.assert_allclose(pages, np.load(path), rtol=1e-3, atol=1e-4)


def test_pages_of_this_format_are_read_by_a_later_worker(live: Any) -> None:
    first, second = live(), live()
    assert (first.fetched, second.fetched) == (0, 2)
    assert first.tokens == second.tokens


def test_pages_of_another_format_are_never_read(live: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither under the names that another version gives them, nor where somebody moved them to ours."""
    monkeypatch.setattr(record, "PAGE_FORMAT", record.PAGE_FORMAT + 1)
    other = live()
    theirs = {path.parent for path in tmp_path.rglob("*") if path.is_file()}
    monkeypatch.undo()
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    ours = live()
    assert (ours.fetched, ours.rejected, ours.tokens) == (0, 0, other.tokens)
    for path in [path for path in tmp_path.rglob("*") if path.is_file() and path not in before]:
        twin = next((each / path.name for each in theirs if (each / path.name).is_file()), None)
        if twin is not None:
            shutil.copyfile(twin, path)
    moved = live()
    assert moved.fetched == 0
    assert moved.rejected == 2
    assert moved.tokens == other.tokens
