"""Runs a model in this program, without a server: a batch, a schema, a choice among answers (pip install 'sapwood[all]').

python examples/engine.py [MODEL]     default: demo, which is fetched if it is not there (93 MB)
"""

import asyncio
import sys

import sapwood

SCHEMA = {
    "type": "object",
    "properties": {"capital": {"type": "string", "maxLength": 20}},
    "required": ["capital"],
    "additionalProperties": False,
}


def blocking(model: str) -> None:
    with sapwood.Engine(model) as engine:
        prompts = [f"The capital of {country} is" for country in ("France", "Italy", "Spain")]
        for prompt, answer in zip(prompts, engine.generate(prompts, max_tokens=8, temperature=0), strict=True):
            print(f"batch: {prompt}{answer.text!r}")
        question = [{"role": "user", "content": "What is the capital of France?"}]
        print("schema:", engine.chat(question, json_schema=SCHEMA, max_tokens=64, temperature=0).text)
        choices = [" Paris", " London", " Tokyo"]
        scores = engine.score((prompts[0], choice) for choice in choices)
        best = max(zip(scores, choices, strict=True), key=lambda found: found[0].logprob)
        print(f"likeliest:{best[1]} ({best[0].logprob:.2f})")


async def streaming(model: str) -> None:
    async with sapwood.AsyncEngine(model) as engine:
        print("streamed:", end="")
        async for delta in engine.stream("The capital of France is", max_tokens=8, temperature=0):
            print(delta.text, end="", flush=True)
        print()


if __name__ == "__main__":
    named = sys.argv[1] if len(sys.argv) > 1 else "demo"
    blocking(named)
    asyncio.run(streaming(named))
