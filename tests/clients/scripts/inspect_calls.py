"""The ordinary calls of ``inspect-ai``, by its providers for servers like ours: ``python inspect_calls.py
http://127.0.0.1:8000/v1``."""

import os
import sys
import tempfile
from typing import Any

from calls import call, run_all
from inspect_ai import Task, eval_set
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool

for provider in ("VLLM", "SGLANG", "SAPWOOD"):  # read when a model is made
    os.environ |= {f"{provider}_BASE_URL": sys.argv[1], f"{provider}_API_KEY": "none"}

PROVIDERS = ("vllm/demo", "sglang/demo", "openai-api/sapwood/demo")


@tool
def add() -> Any:
    """A tool, in the form of this library."""

    async def execute(x: int, y: int) -> int:
        """Adds two numbers.

        Args:
            x: The first.
            y: The second.
        """
        return x + y

    return execute


def task(name: str, *solvers: Any, **config: Any) -> Task:
    return Task(
        name=name,
        dataset=[Sample(input="What is the capital of France?", target="Paris")],
        solver=[*solvers, generate(tool_calls="none")],
        scorer=includes(),
        config=GenerateConfig(**config, max_retries=0),
    )


@call
def tasks() -> None:
    """One call, as this library runs one set of tasks at a time."""
    asked = [
        task("probabilities", max_tokens=8, temperature=0, seed=1, logprobs=True, top_logprobs=2),
        task("choices", max_tokens=8, num_choices=2, stop_seqs=["\n"], top_k=5, frequency_penalty=0.1),
        task("tools", use_tools(add()), max_tokens=8, parallel_tool_calls=False),
        task("effort", max_tokens=8, reasoning_effort="low"),
    ]
    with tempfile.TemporaryDirectory() as logs:
        fine, found = eval_set(asked, logs, model=[*PROVIDERS], display="none", retry_attempts=0)
    assert fine, [log.error for log in found if log.error]
    assert len(found) == len(PROVIDERS) * len(asked)


run_all()
