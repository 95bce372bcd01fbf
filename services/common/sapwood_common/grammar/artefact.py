"""The compiled form of a grammar as bytes.

Layout: magic ``SWG1``; 16 bytes key; 16 bytes fingerprint of the vocabulary; 8 bytes checksum of the rest; the grammar as
UTF-8 text in llguidance's Lark syntax.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

_MAGIC = b"SWG1"
_KEY, _FINGERPRINT, _CHECKSUM = 16, 16, 8
_HEADER = len(_MAGIC) + _KEY + _FINGERPRINT + _CHECKSUM


class ArtefactError(ValueError):
    """The bytes are no compiled grammar."""


@dataclass(frozen=True, slots=True)
class GrammarArtefact:
    """A compiled grammar.

    Attributes:
        key: Its name: what ``GrammarSource.key`` makes of its source.
        fingerprint: The fingerprint of the vocabulary it was compiled for.
        lark: The grammar in Lark's syntax.
    """

    key: bytes
    fingerprint: bytes
    lark: str

    def to_bytes(self) -> bytes:
        """The serialised form."""
        body = self.lark.encode()
        assert len(self.key) == _KEY and len(self.fingerprint) == _FINGERPRINT
        return b"".join((_MAGIC, self.key, self.fingerprint, _checksum(body), body))

    @classmethod
    def from_bytes(cls, raw: bytes) -> GrammarArtefact:
        """The artefact in ``raw``.

        Raises:
            ArtefactError: The bytes are no compiled grammar, or were cut or changed on their way.
        """
        if len(raw) < _HEADER or not raw.startswith(_MAGIC):
            raise ArtefactError("these bytes are not a compiled grammar")
        key_end = len(_MAGIC) + _KEY
        fingerprint_end = key_end + _FINGERPRINT
        body = raw[_HEADER:]
        if raw[fingerprint_end:_HEADER] != _checksum(body):
            raise ArtefactError("the compiled grammar is damaged: its checksum does not match")
        return cls(raw[len(_MAGIC) : key_end], raw[key_end:fingerprint_end], body.decode())


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECKSUM).digest()
