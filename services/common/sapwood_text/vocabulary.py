"""The bytes of single tokens; decoding needs nothing else.

A text is the concatenation of its tokens' bytes, in byte-level BPE and in SentencePiece with byte fallback. So decoding a stream
takes one look-up for each token and an incremental UTF-8 decoder, O(1) for each token, and no window is decoded again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping

from sapwood_common.packed_tokens import PackedTokens


class TokenTable:
    """Looks up the bytes of a token, and caches the result.

    Args:
        spell: Returns the bytes of an id; empty for an id that no token has.
        strips_leading_space: Whether one space at the start of a text is not part of it (SentencePiece's dummy prefix).
    """

    def __init__(self, spell: Callable[[int], bytes], *, strips_leading_space: bool = False) -> None:
        self.spell = spell
        self.strips_leading_space = strips_leading_space
        self._known: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}

    @classmethod
    def packed(cls, tokens: PackedTokens, *, strips_leading_space: bool = False) -> TokenTable:
        """The table of all tokens of a vocabulary."""
        count = len(tokens)
        return cls(lambda index: tokens[index] if index < count else b"", strips_leading_space=strips_leading_space)

    def of(self, token_id: int) -> bytes:
        """The bytes of a token; empty for an id that no token has."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self.spell(token_id)
        return found

    def text(self, token_id: int) -> str | None:
        """The text of a token where its bytes are whole characters, else None."""
        try:
            return self._texts[token_id]
        except KeyError:
            pass
        try:
            text = self.of(token_id).decode()
        except UnicodeDecodeError:
            text = None
        self._texts[token_id] = text
        return text


class ApartTokens(dict[int, bool]):
    """Whether a token is read apart from others: its text is not whole, is blank, may be left out or has one of some characters.

    Args:
        table: The tokens' bytes.
        special: Those that may be left out.
        characters: The characters.
    """

    def __init__(self, table: TokenTable, special: frozenset[int], characters: frozenset[str]) -> None:
        super().__init__()
        self._table = table
        self._special = special
        self._characters = characters

    def __missing__(self, token_id: int) -> bool:
        text = self._table.text(token_id)
        plain = (
            bool(text and text.strip()) and token_id not in self._special and self._characters.isdisjoint(text or "")
        )
        self[token_id] = not plain
        return not plain


class Vocabulary:
    """The tokens of one model.

    Args:
        table: What each stands for.
        size: Every id is below it.
        special: The tokens that text leaves out, with their names.
    """

    def __init__(self, table: TokenTable, size: int, special: Mapping[int, str]) -> None:
        self.table = table
        self.size = size
        self.special_ids = frozenset(special)
        self.special = special
        self._skipped: dict[frozenset[str], frozenset[int]] = {}
        self._apart: dict[frozenset[str], ApartTokens] = {}
        self._sorted: list[bytes] = []

    @property
    def can_extend(self) -> bool:
        """Whether :meth:`extends` may be called."""
        return bool(self._sorted)

    def index_extensions(self) -> None:
        """Sorts the tokens by their bytes, which takes a tenth of a second and some MB; for :meth:`extends`."""
        spell, special = self.table.spell, self.special_ids
        self._sorted = sorted({b"", *(spell(token) for token in range(self.size) if token not in special)})

    def extends(self, text: bytes) -> bool:
        """Whether a token that is not special begins with this text and has more. O(log tokens)."""
        place = bisect_right(self._sorted, text)
        return place < len(self._sorted) and self._sorted[place].startswith(text)

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token; empty for an id that no token has."""
        return self.table.of(token_id)

    def skipped(self, needed: frozenset[str]) -> frozenset[int]:
        """The special tokens without those that a parser needs, by their names."""
        # Streams whose parsers need the same tokens share a set, since models have thousands of special tokens.
        found = self._skipped.get(needed)
        if found is None:
            found = frozenset(token for token, name in self.special.items() if name not in needed)
            self._skipped[needed] = found
        return found

    def apart(self, characters: frozenset[str]) -> ApartTokens:
        """The tokens that are read apart because of some characters; streams with the same ones share what is found."""
        found = self._apart.get(characters)
        if found is None:
            found = self._apart[characters] = ApartTokens(self.table, self.special_ids, characters)
        return found
