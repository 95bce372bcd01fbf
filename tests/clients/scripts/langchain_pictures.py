"""A picture by ``langchain-openai``, in each of its forms: ``python langchain_pictures.py URL FILE EXPECTED``."""

import base64
import sys
from pathlib import Path
from typing import Any

from calls import call, run_all
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

WHERE, FILE, EXPECTED = sys.argv[1:]
DATA = base64.b64encode(Path(FILE).read_bytes()).decode()
SETTINGS: dict[str, Any] = {
    "base_url": WHERE, "api_key": "none", "model": "seeing", "temperature": 0, "max_tokens": 8, "max_retries": 0, "timeout": 300,
}  # fmt: skip
PARTS: list[dict[str, Any]] = [
    {"type": "image", "source_type": "base64", "data": DATA, "mime_type": "image/png"},
    {"type": "image", "base64": DATA, "mime_type": "image/png"},
    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{DATA}"}},
]


def said(chat: ChatOpenAI, part: dict[str, Any]) -> str:
    """What the model says to a picture."""
    return str(chat.invoke([HumanMessage([part, {"type": "text", "text": "What?"}])]).text)


@call
def a_picture_in_a_chat() -> None:
    for part in PARTS:
        assert said(ChatOpenAI(**SETTINGS), part) == EXPECTED, part["type"]


@call
def a_picture_in_responses() -> None:
    assert said(ChatOpenAI(**SETTINGS, use_responses_api=True), PARTS[1]) == EXPECTED


run_all()
