"""Text from outside as logs, metrics and traces may show it: one line, without what moves a terminal's cursor, not too long, and
without the credentials of URLs."""

from __future__ import annotations

import re

_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # controls: line feeds, ESC, NUL
    # other ends of lines, and what changes the order of writing or is not seen
    "\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"
    "\ud800-\udfff]"  # halves of characters, which no encoder takes
)
_CREDENTIALS = re.compile(r"(?<=://)[^\s/?#\"@]*(?:@[^\s/?#\"@]*)*@")
_WORD = re.compile(r"[^\s/\"@]*(?:@[^\s/\"@]*)+")
_BEFORE_NAME = re.compile(r"[,;=('\[{<`|]")
_HIDDEN = "***@"
_NAMED = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
_GAP = " ... "


class LongText(str):
    """A text that a log line may show at length, such as the prompt that an operator wants to see."""

    __slots__ = ()


def cut(text: str, most: int) -> str:
    """A text of at most this many characters, at least 16: the middle of a longer one is left out, and its URLs' credentials."""
    if len(text) <= most:
        return text
    text = without_credentials(text)  # before a cut may part them from their end
    half = (most - len(_GAP)) // 2
    return f"{text[:half]}{_GAP}{text[len(text) - half :]}"


def shown(text: str, most: int) -> str:
    """A text from outside, fit to be shown.

    Args:
        text: The text.
        most: As for :func:`cut`.
    """
    text = cut(text, most)
    text = without_credentials(text)
    if text.isascii() and text.isprintable():
        return text  # the usual case
    return _UNSAFE.sub(_escaped, text)


def without_credentials(text: str) -> str:
    """A text with ``***`` in place of what stands before the host of its URLs, and of ``name:password@host`` without a scheme."""
    if "@" not in text:
        return text
    if "://" in text:
        text = _CREDENTIALS.sub(_HIDDEN, text)
    return _WORD.sub(_without_password, text) if ":" in text else text


def _without_password(found: re.Match[str]) -> str:
    """A word with an @ without what stands before its last one, if that is a name and a password."""
    before, _, host = found[0].rpartition("@")
    name, colon, _ = before.partition(":")
    if not colon:
        return found[0]
    start = max((each.end() for each in _BEFORE_NAME.finditer(name)), default=0)
    return f"{name[:start]}{_HIDDEN}{host}"


def _escaped(found: re.Match[str]) -> str:
    character = found[0]
    return _NAMED.get(character) or (f"\\x{ord(character):02x}" if ord(character) < 256 else f"\\u{ord(character):04x}")
