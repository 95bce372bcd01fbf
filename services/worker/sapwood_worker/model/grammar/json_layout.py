"""White space of JSON, as the model wrote it last: drafts what stands between a value and the next text that a grammar forces.

A grammar that allows white space forces no text after a comma or a colon, but a model writes the same there again and again. So
the tokens that came after such a character, down to the next quotation mark or bracket, are kept by the character and the depth
of brackets. They are a guess: the grammar says whether they may come, and the model whether they do. O(bytes) a token; at most
``_MOST_KEPT`` sequences for each of a bounded number of places.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

Sequences = dict[tuple[int, int], list[tuple[int, ...]]]
"""By the last character outside of white space and the depth: what followed, the latest first."""

_START = 0
_STRUCTURE = b'{[}],:"'
_MEMBER = b","[0]
_GAP = frozenset(b' \t\r\n{["')
"""What a token between the parts of JSON is made of."""
_MOST_KEPT = 4
_LONGEST = 8
_DEEPEST = 32
_QUOTE, _ESCAPE = b'"\\'


@dataclass(frozen=True, slots=True)
class Place:
    """Where a text is.

    Attributes:
        in_string: Whether within quotation marks.
        escaped: Whether a backslash came just before.
        depth: Brackets that are open.
        after: The last character of structure, if nothing but ``gap`` came since; -1: a value has begun.
        gap: The tokens since.
    """

    in_string: bool = False
    escaped: bool = False
    depth: int = 0
    after: int = _START
    gap: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[int, int]:
        """Under which what follows is kept: the members of one object or list have the same white space before them."""
        return (_MEMBER if self.after in b"{[," else self.after), self.depth

    def advance(self, token: int, text: bytes) -> Place:
        """The place after a token."""
        in_string, escaped, depth, last = self.in_string, self.escaped, self.depth, -1
        for byte in text:
            if in_string:
                in_string = escaped or byte != _QUOTE
                escaped = not escaped and byte == _ESCAPE
                last = -1 if in_string else _QUOTE
            elif byte == _QUOTE:
                in_string, last = True, -1
            else:
                depth = min(_DEEPEST, max(0, depth + (byte in b"{[") - (byte in b"}]")))
                last = byte if byte in _STRUCTURE else last if byte in b" \t\r\n" else -1
        if in_string or last >= 0:
            return Place(in_string, escaped, depth, last)
        if self.after >= 0 and text and _GAP.issuperset(text) and len(self.gap) < _LONGEST:
            return replace(self, gap=(*self.gap, token))
        return Place(depth=depth, after=-1)


class JsonLayout:
    """Follows one request's text and learns its white space.

    Args:
        tokens: The bytes of every token.
        usual: What other requests of the model wrote; learns as well.
    """

    def __init__(self, tokens: list[bytes], usual: Sequences) -> None:
        self._tokens = tokens
        self._usual = usual
        self._own: Sequences = {}
        self.place = Place()

    def read(self, token: int) -> None:
        """Takes a token of the output."""
        before, text = self.place, self._text(token)
        self.place = self.after(before, token)
        if before.after < 0 or before.in_string or self.place.gap:
            return
        whole = (*before.gap, token) if text and _GAP.issuperset(text) else before.gap
        for kept in (self._own, self._usual) if whole else ():
            found = kept.setdefault(before.key, [])
            if whole in found:
                found.remove(whole)
            found.insert(0, whole)
            del found[_MOST_KEPT:]

    def after(self, place: Place, token: int) -> Place:
        """The place after one more token."""
        return place.advance(token, self._text(token))

    def guesses(self, place: Place) -> list[tuple[int, ...]]:
        """What may follow there, the likeliest first; of the same likelihood the longest first."""
        if place.after < 0 or place.in_string:
            return []
        kept = self._own.get(place.key) or self._usual.get(place.key, [])
        begun = len(place.gap)
        return [each[begun:] for each in kept if len(each) > begun and each[:begun] == place.gap]

    def _text(self, token: int) -> bytes:
        return self._tokens[token] if token < len(self._tokens) else b""
