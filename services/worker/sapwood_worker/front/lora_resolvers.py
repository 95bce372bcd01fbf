"""What finds adapters that requests name and the worker does not know: ``folder``, and resolvers of installed packages.

A package declares an entry point of the group :data:`LORA_RESOLVERS`, a :data:`MakeResolver`. It runs in the worker, in a
thread, when a request comes; what it returns is loaded as ``--lora`` would load it.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from sapwood_common.errors import ConfigError
from sapwood_common.models.adapters import CONFIG
from sapwood_common.models.model_files import local_path
from sapwood_common.models.url_files import is_url
from sapwood_common.plugins import find_part
from sapwood_worker.front.loras import Resolver

LORA_RESOLVERS = "sapwood.lora_resolvers"
"""The group of entry points."""

MakeResolver = Callable[[str], Resolver]
"""Makes a resolver from what follows the colon in ``--lora-slots resolver=NAME:ARGUMENT``. Raises ConfigError."""

_PLAIN = re.compile(r"[A-Za-z0-9_][\w.-]*")


def make_resolver(setting: str) -> Resolver | None:
    """The resolver that a setting names; None: it is empty.

    Raises:
        ConfigError: There is none of this name, or it cannot be made.
    """
    if not setting:
        return None
    name, _, argument = setting.partition(":")
    make = find_part(LORA_RESOLVERS, name, _OWN)
    return make(argument)


def in_folder(folder: str) -> Resolver:
    """Finds the adapter NAME at ``folder/NAME``; a name that is no plain file name is not looked for.

    Args:
        folder: A folder of this machine, or a URL.

    Raises:
        ConfigError: There is no such folder.
    """
    if is_url(folder):
        return lambda name: f"{folder.rstrip('/')}/{name}" if _PLAIN.fullmatch(name) else None
    base = local_path(folder)
    if not folder or not base.is_dir():
        raise ConfigError(f"--lora-slots resolver: {folder!r} is no folder")

    def find(name: str) -> str | None:
        found = base / name
        return str(found) if _PLAIN.fullmatch(name) and (found / CONFIG).is_file() else None

    return find


_OWN: dict[str, MakeResolver] = {"folder": in_folder}
