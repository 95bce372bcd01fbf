"""The ordinary calls of the official ``openai`` client: ``python openai_calls.py http://127.0.0.1:8000/v1``."""

import sys
from typing import Literal

import openai
from pydantic import BaseModel

client = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0, timeout=300)
MESSAGES = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": "Say hello."}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Rome", "Paris"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
            "strict": True,
        },
    }
]


class Colour(BaseModel):
    """What the structured answer is."""

    name: Literal["red", "green", "blue"]


answer = client.chat.completions.create(
    model="demo", messages=MESSAGES, max_completion_tokens=4, temperature=0, seed=1, user="me", stop=["\n\n"], n=2,
    logprobs=True, top_logprobs=2, presence_penalty=0, frequency_penalty=0, reasoning_effort="low", verbosity="low",
    store=False, metadata={"a": "b"}, service_tier="auto", prompt_cache_key="k", safety_identifier="s",
)  # fmt: skip
assert len(answer.choices) == 2 and answer.choices[0].logprobs.content
stream = client.chat.completions.create(
    model="demo", messages=MESSAGES, max_tokens=4, temperature=0, stream=True, stream_options={"include_usage": True}
)
chunks = list(stream)
assert chunks[-1].usage.completion_tokens > 0
with client.chat.completions.stream(
    model="demo", messages=MESSAGES, max_tokens=64, temperature=0, response_format=Colour
) as events:
    events.until_done()
    assert events.get_final_completion().choices[0].message.parsed
for choice in ("auto", "none", "required", {"type": "function", "function": {"name": "weather"}}):
    answer = client.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=6 if choice in ("auto", "none") else 48, temperature=0, tools=TOOLS,
        tool_choice=choice, parallel_tool_calls=False,
    )  # fmt: skip
    if choice not in ("auto", "none"):
        call = answer.choices[0].message.tool_calls[0]
        assert call.function.name == "weather"
        result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
        again = [*MESSAGES, answer.choices[0].message, result, {"role": "user", "content": "So?"}]
        client.chat.completions.create(model="demo", messages=again, max_tokens=4, tools=TOOLS)
parsed = client.chat.completions.parse(
    model="demo", messages=MESSAGES, max_tokens=64, response_format=Colour, temperature=0
)
assert parsed.choices[0].message.parsed.name in ("red", "green", "blue")
answer = client.completions.create(model="demo", prompt="The capital of France is", max_tokens=4, temperature=0)
assert answer.choices[0].text
texts = [
    chunk.choices[0].text
    for chunk in client.completions.create(model="demo", prompt="Once", max_tokens=4, stream=True, temperature=0)
]
assert "".join(texts)
assert len(client.embeddings.create(model="demo", input=["a", "b"]).data) == 2
assert [model.id for model in client.models.list()] == ["demo"]
print("ok")
