"""A caller's grammar: its kind, text and options, and the key of its compiled form."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Literal

GrammarKind = Literal["json_schema", "regex", "ebnf", "structural_tag"]

FORMAT_VERSION = 1
"""Part of every key: raised when the same source compiles to something else."""


@dataclass(frozen=True, slots=True)
class GrammarOptions:
    """How a source is read.

    Attributes:
        any_whitespace: JSON may have white space between its parts (bounded); else none.
        lenient: Keywords and formats of a JSON schema that cannot be enforced are ignored; else they are an error.
    """

    any_whitespace: bool = True
    lenient: bool = False


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar as its author wrote it.

    Attributes:
        kind: What ``text`` is.
        text: The schema (JSON), the expression, the rules, or the structural tag (JSON).
        options: How to read it.
        salt: Requests share the compiled grammar, and everything made from it, only if their salts are equal.
    """

    kind: GrammarKind
    text: str
    options: GrammarOptions = GrammarOptions()
    salt: str = ""

    def key(self, fingerprint: bytes) -> bytes:
        """16 bytes that name the compiled form: a cryptographic hash, because sources come from strangers.

        Args:
            fingerprint: The vocabulary's.
        """
        digest = hashlib.blake2b(digest_size=16)
        options = [FORMAT_VERSION, self.kind, self.options.any_whitespace, self.options.lenient]
        head = json.dumps(options).encode()
        for part in (fingerprint, head, self.text.encode(), self.salt.encode()):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        return digest.digest()
