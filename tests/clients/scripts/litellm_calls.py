"""The ordinary calls of ``litellm``, by two of its providers: ``python litellm_calls.py http://127.0.0.1:8000/v1``."""

import json
import sys
from typing import Literal

import litellm
from pydantic import BaseModel

MESSAGES = [{"role": "user", "content": "Say hello."}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 12}},
                "required": ["city"],
            },
        },
    }
]


class Colour(BaseModel):
    """What the structured answer is."""

    name: Literal["red", "green", "blue"]


for provider in ("openai", "hosted_vllm"):
    where = {"model": f"{provider}/demo", "api_base": sys.argv[1], "api_key": "none", "num_retries": 0, "timeout": 300}
    assert litellm.completion(**where, messages=MESSAGES, max_tokens=4, temperature=0).choices[0].message.content
    chunks = list(
        litellm.completion(
            **where, messages=MESSAGES, max_tokens=4, stream=True, stream_options={"include_usage": True}, temperature=0
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    litellm.completion(**where, messages=MESSAGES, tools=TOOLS, tool_choice="auto", max_tokens=4)
    answer = litellm.completion(**where, messages=MESSAGES, tools=TOOLS, tool_choice="required", max_tokens=48)
    assert answer.choices[0].message.tool_calls[0].function.name == "weather"
    # With a limit as large as clients like to send.
    answer = litellm.completion(**where, messages=MESSAGES, response_format=Colour, max_tokens=1_000_000)
    assert json.loads(answer.choices[0].message.content)["name"] in ("red", "green", "blue")
    assert len(litellm.embedding(**where, input=["a", "b"]).data) == 2
where["model"] = "text-completion-openai/demo"
assert litellm.text_completion(**where, prompt="The capital of France is", max_tokens=4).choices[0].text
assert list(litellm.text_completion(**where, prompt="Once upon a time", max_tokens=4, stream=True))
print("ok")
