"""The settings of a model's image and video processors, which tokenizer and worker read alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sapwood_common.errors import ConfigError
from sapwood_common.models.json_file import read_json_object

_OWN, _JOINT = "preprocessor_config.json", "processor_config.json"
_VIDEO = "video_preprocessor_config.json"


def read_image_processor(directory: Path) -> dict[str, Any]:
    """What ``preprocessor_config.json`` says, or ``processor_config.json`` of the image processor; empty: there is neither.

    Raises:
        ConfigError: A file cannot be read, or holds something else; names it.
    """
    if (directory / _OWN).exists():
        return read_json_object(directory / _OWN)
    if not (directory / _JOINT).exists():
        return {}
    found = read_json_object(directory / _JOINT).get("image_processor") or {}
    if not isinstance(found, dict):
        raise ConfigError(f"{directory / _JOINT}: image_processor is {found!r:.60}; it can be an object")
    return found


def read_video_processor(directory: Path) -> dict[str, Any]:
    """What ``processor_config.json`` says of the video processor, else ``video_preprocessor_config.json``, else, as transformers
    has it, the settings for pictures; empty: there are none.

    Raises:
        ConfigError: A file cannot be read, or holds something else; names it.
    """
    if (directory / _JOINT).exists():
        found = read_json_object(directory / _JOINT).get("video_processor")
        if isinstance(found, dict):
            return found
        if found is not None:
            raise ConfigError(f"{directory / _JOINT}: video_processor is {found!r:.60}; it can be an object")
    if (directory / _VIDEO).exists():
        return read_json_object(directory / _VIDEO)
    return read_json_object(directory / _OWN) if (directory / _OWN).exists() else {}
