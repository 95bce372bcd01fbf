"""SGLang's kits as test cases against a running server; ``run_suite.py`` lays ``sglang/test/kits`` on the path."""

from __future__ import annotations

import importlib
import os
import unittest
from unittest.mock import MagicMock

import openai
import requests

KITS = (
    "abort_timeout",
    "anthropic_messages",
    "basic_api_contract",
    "basic_decode_correctness",
    "basic_scheduler_stress",
    "ebnf_constrained",
    "json_constrained",
    "json_mode",
    "matched_stop",
    "pause_generation",
    "prefix_cache_branching",
    "reasoning",
    "regex_constrained",
    "streaming_session",
    "unified_radix_cache",
)
SERVER = os.environ.get("SERVER", "")


def flush_cache() -> None:
    """Empties the server's cache of prefixes."""
    requests.post(f"{SERVER}/flush_cache", timeout=60).raise_for_status()


# What the kits leave to the class that has them; the last ones are numbers that a CPU can do in a minute.
NAMES = {
    "model": "demo",
    "served_model_name": "demo",
    "base_url": SERVER,
    "api_key": "none",
    "process": MagicMock(poll=lambda: None),
    "flush_cache": staticmethod(flush_cache),
    "cache_chunk_size": 64,
    "client": openai.OpenAI(base_url=f"{SERVER}/v1", api_key="none"),
    "running_timeout_max_new_tokens": 64,
    "pause_num_requests": 4,
    "pause_max_new_tokens": 64,
}

for kit in KITS:
    module = importlib.import_module(f"sglang.test.kits.{kit}_kit")
    for name, found in vars(module).items():
        if (
            isinstance(found, type)
            and found.__module__ == module.__name__
            and any(n.startswith("test") for n in vars(found))
        ):
            globals()[f"Test{name}"] = type(f"Test{name}", (found, unittest.TestCase), dict(NAMES))
