"""Pieces of the engine's Lark syntax, and other notations written in it."""

from __future__ import annotations

import json

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from sapwood_common.grammar.json_schema import GrammarError


def literal(text: str) -> str:
    """A string literal."""
    return json.dumps(text, ensure_ascii=False)


def regex(pattern: str) -> str:
    """A regular expression between slashes.

    Raises:
        GrammarError: It is empty.
    """
    if not pattern:
        raise GrammarError("the regular expression is empty")
    return f"/{llguidance.regex_to_lark(pattern)}/"


def lark_of_ebnf(text: str) -> str:
    """Rules of the form ``root ::= ...`` (as llama.cpp's GBNF and SGLang's ``ebnf``), or Lark's own, in Lark's syntax.

    Raises:
        GrammarError: They cannot be read.
    """
    if not text.strip():
        raise GrammarError("the grammar is empty")
    try:
        lark: str = any_to_lark(text)
    except RecursionError as error:
        raise GrammarError("the grammar is nested too deep") from error
    except Exception as error:  # the converter lets its parser's errors out, such as IndexError
        raise GrammarError(f"the grammar cannot be read: {error}") from error
    return lark
