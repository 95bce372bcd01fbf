"""The ordinary calls of ``langchain-openai``: ``python langchain_calls.py http://127.0.0.1:8000/v1``."""

import sys
from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

WHERE = {"base_url": sys.argv[1], "api_key": "none", "model": "demo"}
SETTINGS = {**WHERE, "temperature": 0, "max_retries": 0, "timeout": 300, "stream_usage": True}
chat, caller = ChatOpenAI(**SETTINGS, max_tokens=6), ChatOpenAI(**SETTINGS, max_tokens=64)


class Colour(BaseModel):
    """A colour."""

    name: Literal["red", "green", "blue"]


@tool
def weather(city: Literal["Rome", "Paris"]) -> str:
    """Tells the weather of a city."""
    return f"rain in {city}"


assert chat.invoke("Say hello.").content
pieces = list(chat.stream("Say hello."))
assert "".join(piece.content for piece in pieces)
assert any(piece.usage_metadata for piece in pieces)
assert len(chat.batch(["One?", "Two?"])) == 2
chat.bind_tools([weather]).invoke("How is the weather in Rome?")
calls = (
    caller.bind_tools([weather], tool_choice="weather", strict=True).invoke("How is the weather in Rome?").tool_calls
)
assert calls[0]["name"] == "weather"
for method in ("json_schema", "function_calling"):
    found = caller.with_structured_output(Colour, method=method, strict=True).invoke("Which colour?")
    assert found.name in ("red", "green", "blue"), method
assert OpenAI(**WHERE, max_tokens=4, temperature=0).invoke("The capital of France is")
assert "".join(OpenAI(**WHERE, max_tokens=4, temperature=0).stream("Once upon a time"))
embeddings = OpenAIEmbeddings(**WHERE, check_embedding_ctx_length=False)  # which would fetch OpenAI's tokenizer
assert len(embeddings.embed_documents(["a", "b"])) == 2
assert embeddings.embed_query("a")
print("ok")
