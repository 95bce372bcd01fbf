"""The compiled form of a grammar as bytes.

Layout: magic ``SWG``, and a byte for the version, now ``2``; 16 bytes key; 16 bytes fingerprint of the vocabulary; 8 bytes
checksum of the rest; JSON with the grammar in llguidance's Lark syntax, which has been checked, and with the source, for workers
whose backend reads that. In every version the source stands there in this way, so that a worker of another version compiles it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace

from sapwood_common.grammar.source import GrammarOptions, GrammarSource

COMPILE_STACK_BYTES, BUILD_STACK_BYTES = 128 << 20, 256 << 20
"""Stacks of the threads that compile a grammar, and that build a matcher of it in a worker. The engine follows a chain of
references or rules by recursion, and ends the process where its stack does; its longest chain needs less than half of the first.
What compiles can be built, since the second is larger."""
_MAGIC, _VERSION = b"SWG", b"2"
_KEY, _FINGERPRINT, _CHECKSUM = 16, 16, 8
_START = len(_MAGIC) + len(_VERSION)
_HEADER = _START + _KEY + _FINGERPRINT + _CHECKSUM


class ArtefactError(ValueError):
    """The bytes are no compiled grammar."""


@dataclass(frozen=True, slots=True)
class GrammarArtefact:
    """A compiled grammar.

    Attributes:
        key: Its name: what ``GrammarSource.key`` makes of its source.
        fingerprint: The fingerprint of the vocabulary it was compiled for.
        lark: The grammar in Lark's syntax.
        source: The source text, without the salt.
        current: Whether it is of this version; else only ``source`` and ``fingerprint`` are of use.
    """

    key: bytes
    fingerprint: bytes
    lark: str
    source: GrammarSource
    current: bool = True

    @staticmethod
    def of(source: GrammarSource, fingerprint: bytes, lark: str) -> GrammarArtefact:
        """The artefact of a source that was compiled to ``lark``."""
        return GrammarArtefact(source.key(fingerprint), fingerprint, lark, replace(source, salt=""))

    def to_bytes(self) -> bytes:
        """The serialised form."""
        source = self.source
        fields = (self.lark, source.kind, source.text, source.options.any_whitespace, source.options.lenient)
        body = json.dumps(fields, ensure_ascii=False).encode()
        assert len(self.key) == _KEY and len(self.fingerprint) == _FINGERPRINT
        return b"".join((_MAGIC, _VERSION, self.key, self.fingerprint, _checksum(body), body))

    @classmethod
    def from_bytes(cls, raw: bytes) -> GrammarArtefact:
        """The artefact in ``raw``.

        Raises:
            ArtefactError: The bytes are no compiled grammar, or were cut or changed on their way.
        """
        if len(raw) < _HEADER or not raw.startswith(_MAGIC):
            raise ArtefactError("these bytes are not a compiled grammar")
        key_end = _START + _KEY
        fingerprint_end = key_end + _FINGERPRINT
        body = raw[_HEADER:]
        if raw[fingerprint_end:_HEADER] != _checksum(body):
            raise ArtefactError("the compiled grammar is damaged: its checksum does not match")
        try:
            lark, kind, text, whitespace, lenient = json.loads(body)[:5]
        except (ValueError, TypeError) as error:
            raise ArtefactError("the compiled grammar has no source that this version reads") from error
        source = GrammarSource(kind, text, GrammarOptions(whitespace, lenient))
        current = raw[len(_MAGIC) : _START] == _VERSION
        return cls(raw[_START:key_end], raw[key_end:fingerprint_end], lark, source, current)


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECKSUM).digest()
