"""The grammar backends by name; packages add theirs as entry points of ``GROUP``."""

from __future__ import annotations

from sapwood_common.errors import ConfigError
from sapwood_common.plugins import find_part
from sapwood_worker.model.grammar.backend import GrammarBackend, GrammarNeeds, MakeBackend
from sapwood_worker.model.grammar.llguidance import make_llguidance
from sapwood_worker.model.grammar.xgrammar import make_xgrammar
from sapwood_worker.settings import GRAMMAR_BACKENDS as GROUP

_BACKENDS: dict[str, MakeBackend] = {"llguidance": make_llguidance, "xgrammar": make_xgrammar}


def make_backend(name: str, needs: GrammarNeeds) -> GrammarBackend:
    """The backend of a name.

    Raises:
        ConfigError: There is none, or it cannot be used here.
    """
    try:
        make = find_part(GROUP, name, _BACKENDS)
    except ConfigError as error:
        raise ConfigError(f"--structured-output backend={name}: {error}") from error
    return make(needs)
