"""SGLang's kits as test cases against a running server; ``run_suite.py`` lays ``sglang/test/kits`` on the path."""

from __future__ import annotations

import importlib
import os
import unittest

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
NAMES = {"model": "demo", "base_url": os.environ.get("SERVER", ""), "process": None, "api_key": "none"}

for kit in KITS:
    module = importlib.import_module(f"sglang.test.kits.{kit}_kit")
    for name, found in vars(module).items():
        if (
            isinstance(found, type)
            and found.__module__ == module.__name__
            and any(n.startswith("test") for n in vars(found))
        ):
            globals()[f"Test{name}"] = type(f"Test{name}", (found, unittest.TestCase), dict(NAMES))
