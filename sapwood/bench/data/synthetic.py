"""Conversations that are made up. Each maker continues for ever, and the same seed gives the same ones."""

from __future__ import annotations

import json
import random
from typing import Any

from sapwood.bench.data.conversation import Ask, Conversation, Conversations
from sapwood.bench.data.lengths import Lengths
from sapwood.bench.data.words import WORDS, PromptMaker

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "colours"],
    "additionalProperties": False,
}
"""The schema that answers of :func:`json_schema` match unless another one is given."""


def random_prompts(maker: PromptMaker, inputs: Lengths, outputs: Lengths, seed: int) -> Conversations:
    """Prompts that have nothing in common."""
    draw = random.Random(f"random {seed}")
    while True:
        prompt = maker.make(draw, inputs.draw(draw))
        yield Conversation((Ask(prompt, outputs.draw(draw)),))


def shared_prefix(
    maker: PromptMaker, groups: int, prefix: Lengths, inputs: Lengths, outputs: Lengths, seed: int
) -> Conversations:
    """Prompts in groups; all prompts of a group begin alike.

    Args:
        maker: Makes the texts.
        groups: How many beginnings there are; each prompt has one of them at random.
        prefix: Tokens of a beginning.
        inputs: Tokens that a prompt has next to it.
        outputs: The most tokens of an answer.
        seed: The seed of all that is drawn.
    """
    draw = random.Random(f"shared prefix {seed}")
    prefixes = [maker.make(draw, prefix.draw(draw)) for _ in range(groups)]
    while True:
        prompt = maker.join([draw.choice(prefixes), maker.make(draw, inputs.draw(draw))])
        yield Conversation((Ask(prompt, outputs.draw(draw)),))


def multi_turn(maker: PromptMaker, turns: Lengths, inputs: Lengths, outputs: Lengths, seed: int) -> Conversations:
    """Conversations of several turns; each turn adds ``inputs`` tokens to what was said."""
    draw = random.Random(f"multi-turn {seed}")
    while True:
        count = turns.draw(draw)
        yield Conversation(tuple(Ask(maker.make(draw, inputs.draw(draw)), outputs.draw(draw)) for _ in range(count)))


def json_schema(schema: dict[str, Any], outputs: Lengths, seed: int) -> Conversations:
    """Prompts whose answers must match a JSON schema."""
    draw = random.Random(f"json schema {seed}")
    text = json.dumps(schema)
    while True:
        about = " ".join(draw.choices(WORDS, k=8))
        prompt = f"Invent a record about: {about}. Answer with JSON that matches this schema: {text}\n"
        yield Conversation((Ask(prompt, outputs.draw(draw), text),))
