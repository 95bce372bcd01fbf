"""Templates of conversations on the client's side: what is written before and after a turn of each role.

Backends that take messages leave that to the server, whose own template is right; there a template only says how ``s.text()``
shows a conversation. With ``template=`` a backend gets the text, as a completion.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Template:
    """How a conversation is written.

    Attributes:
        name: What it is called.
        turns: Role to what comes before and after its turn.
        begin: Before the first turn.
        stop: Texts at which an answer has ended.
        default_system: The system's turn where the program has none; None: none.
    """

    name: str
    turns: Mapping[str, tuple[str, str]]
    begin: str = ""
    stop: tuple[str, ...] = ()
    default_system: str | None = None

    def around(self, role: str, *, first: bool) -> tuple[str, str]:
        """What comes before and after a turn. Raises ValueError if the template has no such role."""
        if role not in self.turns:
            raise ValueError(f"template {self.name!r} has no role {role!r}")
        before, after = self.turns[role]
        return (self.begin + before if first else before), after


def _same(before: str, after: str) -> dict[str, tuple[str, str]]:
    return {role: (before.format(role=role), after) for role in ("system", "user", "assistant")}


_REGISTRY: dict[str, tuple[Template, re.Pattern[str] | None]] = {}


def register_template(template: Template, models: str | None = None) -> None:
    """Adds a template, or replaces one.

    Args:
        template: Found by its name.
        models: A regular expression: models whose name it finds use this template where none is named.
    """
    _REGISTRY[template.name] = (template, re.compile(models, re.IGNORECASE) if models else None)


def get_template(name: str) -> Template:
    """The template of this name. Raises ValueError if there is none."""
    if name not in _REGISTRY:
        raise ValueError(f"there is no template {name!r}; there are {', '.join(sorted(_REGISTRY))}")
    return _REGISTRY[name][0]


def template_of(model: str) -> Template:
    """The template of a model, by its name; ``plain`` if none fits."""
    return next(
        (template for template, models in _REGISTRY.values() if models and models.search(model)), get_template("plain")
    )


register_template(
    Template("plain", {"system": ("SYSTEM:", "\n"), "user": ("USER:", "\n"), "assistant": ("ASSISTANT:", "\n")})
)
register_template(
    Template("chatml", _same("<|im_start|>{role}\n", "<|im_end|>\n"), stop=("<|im_end|>",)), r"qwen|chatml|hermes|yi-"
)
register_template(
    Template(
        "llama-3",
        _same("<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>"),
        begin="<|begin_of_text|>",
        stop=("<|eot_id|>",),
    ),
    r"llama-?3",
)
register_template(
    Template(
        "gemma",
        {
            "system": ("<start_of_turn>user\n", "<end_of_turn>\n"),
            "user": ("<start_of_turn>user\n", "<end_of_turn>\n"),
            "assistant": ("<start_of_turn>model\n", "<end_of_turn>\n"),
        },
        stop=("<end_of_turn>",),
    ),
    r"gemma",
)
register_template(
    Template(
        "mistral",
        {"system": ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"), "user": ("[INST]", "[/INST]"), "assistant": ("", "</s>")},
        stop=("</s>",),
    ),
    r"mistral|ministral|mixtral",
)
register_template(
    Template(
        "deepseek",
        {"system": ("", ""), "user": ("<｜User｜>", ""), "assistant": ("<｜Assistant｜>", "<｜end▁of▁sentence｜>")},
        begin="<｜begin▁of▁sentence｜>",
        stop=("<｜end▁of▁sentence｜>",),
    ),
    r"deepseek",
)
