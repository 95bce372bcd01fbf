"""What single tokens stand for, as far as the tokenizer was asked."""

from __future__ import annotations


class TokenTable(dict[int, bytes]):
    """The bytes of tokens.

    Attributes:
        special: Those of them that are special tokens, which text leaves out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.special: set[int] = set()
