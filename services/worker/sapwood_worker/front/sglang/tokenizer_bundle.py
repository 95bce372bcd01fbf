"""A model's tokenizer files as one archive, for gateways that do not have the model's folder."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

from sapwood_common.errors import UnimplementedError

_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_SAME_DATE = (1980, 1, 1, 0, 0, 0)


def tokenizer_bundle(folder: Path) -> bytes:
    """The tokenizer files of a folder, zipped; equal files give equal bytes.

    Reads and packs megabytes: not for an event loop.

    Raises:
        UnimplementedError: It is one file, or has no tokenizer.
    """
    files = [folder / name for name in _FILES if (folder / name).is_file()]
    if not any(file.name.startswith("tokenizer.") for file in files):
        raise UnimplementedError(
            f"{folder.name} has no tokenizer files for gateways: give the worker --sglang-tokenizer"
        )
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for file in files:
            packed.writestr(zipfile.ZipInfo(file.name, _SAME_DATE), file.read_bytes(), zipfile.ZIP_DEFLATED)
    return archive.getvalue()
