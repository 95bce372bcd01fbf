"""Programs of language models: text by ``+=``, ``gen``, ``select``, roles, forks, over any of several backends.

    import sapwood.lang as sl

    @sl.function
    def answer(s: sl.State, question: str) -> None:
        s += "Q: " + question + "\\nA:" + sl.gen("answer", stop="\\n", temperature=0)

    state = answer.run("What is the capital of France?", backend=sl.Sapwood())
    print(state["answer"])

Programs written for SGLang's language run with ``import sapwood.lang as sgl``. Importing this needs nothing but what
``sapwood.client`` needs; a backend imports its library when it is made.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sapwood.lang.backends.base import Ability, Backend
from sapwood.lang.choices import (
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)
from sapwood.lang.defaults import flush_cache, get_server_info, global_config, set_default_backend
from sapwood.lang.errors import ProgramError, UnsupportedError, UntraceableError
from sapwood.lang.nodes import (
    Expression,
    GenOptions,
    assistant,
    assistant_begin,
    assistant_end,
    commit,
    gen,
    gen_float,
    gen_int,
    gen_string,
    image,
    select,
    separate_reasoning,
    system,
    system_begin,
    system_end,
    user,
    user_begin,
    user_end,
    video,
)
from sapwood.lang.program import Program, function
from sapwood.lang.state import Forks, State
from sapwood.lang.templates import Template, get_template, register_template
from sapwood.lang.timeline import Timeline
from sapwood.lang.trace import Trace

if TYPE_CHECKING:
    from sapwood.lang.backends.anthropic import Anthropic
    from sapwood.lang.backends.engine import EngineBackend
    from sapwood.lang.backends.http import SapwoodHttp
    from sapwood.lang.backends.http import runtime_endpoint as RuntimeEndpoint
    from sapwood.lang.backends.litellm import LiteLLM
    from sapwood.lang.backends.openai import OpenAI
    from sapwood.lang.backends.sapwood import Sapwood

__all__ = [
    "Ability",
    "Anthropic",
    "Backend",
    "EngineBackend",
    "Expression",
    "Forks",
    "GenOptions",
    "LiteLLM",
    "OpenAI",
    "Program",
    "ProgramError",
    "RuntimeEndpoint",
    "Sapwood",
    "SapwoodHttp",
    "State",
    "Template",
    "Timeline",
    "Trace",
    "UnsupportedError",
    "UntraceableError",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "commit",
    "flush_cache",
    "function",
    "gen",
    "gen_float",
    "gen_int",
    "gen_string",
    "get_server_info",
    "get_template",
    "global_config",
    "greedy_token_selection",
    "image",
    "register_template",
    "select",
    "separate_reasoning",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
    "video",
]

_BACKENDS = {
    "Anthropic": ("anthropic", "Anthropic"),
    "EngineBackend": ("engine", "EngineBackend"),
    "LiteLLM": ("litellm", "LiteLLM"),
    "OpenAI": ("openai", "OpenAI"),
    "RuntimeEndpoint": ("http", "runtime_endpoint"),
    "Sapwood": ("sapwood", "Sapwood"),
    "SapwoodHttp": ("http", "SapwoodHttp"),
}


if not TYPE_CHECKING:  # else a name that there is not would be Any

    def __getattr__(name: str) -> Any:
        """Imports a backend when it is first named."""
        if name not in _BACKENDS:
            raise AttributeError(f"module 'sapwood.lang' has no attribute {name!r}")
        module, found = _BACKENDS[name]
        return getattr(import_module(f"sapwood.lang.backends.{module}"), found)
