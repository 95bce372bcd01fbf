"""Names of the files of a GGUF model that is stored in several."""

from __future__ import annotations

import re
from collections.abc import Sequence

_PART = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>(?!00000)\d{5})\.gguf")


def part_names(name: str) -> Sequence[str]:
    """The names of all files of a model, in order.

    Args:
        name: The path or name of one of them: ``x-00001-of-00003.gguf``. Of another name it is the only one.
    """
    found = _PART.fullmatch(name)
    if found is None:
        return [name]
    count = int(found["count"])
    return [f"{found['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def without_part(name: str) -> str:
    """A file's name without its ending, and without what says which part of a model it is."""
    found = _PART.fullmatch(name)
    return name.removesuffix(".gguf") if found is None else found["stem"]
