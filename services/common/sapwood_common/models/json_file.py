"""Reads JSON files that come with a model. They may be damaged or malicious: their content is not trusted."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from sapwood_common.errors import ConfigError

_LARGEST = 1 << 28
"""Bytes. Published tokenizers have up to 40 MB, indexes of shards up to 20 MB."""


def read_json_value(path: Path) -> Any:
    """The value in a JSON file.

    Raises:
        FileNotFoundError: There is no such file.
        ConfigError: It is no file, too large, or not JSON; names it.
    """
    try:
        # A pipe must not keep us waiting, nor a device give bytes without end.
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(file, "rb") as content:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{path}: is no file")
            if status.st_size > _LARGEST:
                raise ConfigError(f"{path}: has {status.st_size} bytes; at most {_LARGEST} are read")
            if status.st_size == 0:
                raise ConfigError(f"{path}: is empty")
            return json.loads(content.read())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(f"{path}: cannot be read as JSON: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: cannot be read as JSON: it is nested too deeply") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ConfigError: As :func:`read_json_value`, and if there is no such file or it holds something else.
    """
    try:
        value = read_json_value(path)
    except FileNotFoundError as error:
        raise ConfigError(str(error)) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds no JSON object")
    return value
