"""Where adapters (LoRA) are kept, and which folder or file a path of ``--lora`` stands for. Fetches what is not here."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from sapwood_common.errors import ConfigError
from sapwood_common.models.hub import Hub, parse_hub_name
from sapwood_common.models.model_files import local_path, sapwood_home
from sapwood_common.models.url_files import UrlFolders, is_url

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
FILES = (CONFIG, WEIGHTS)


def find_adapter(path: str, *, may_fetch: bool = True) -> Path:
    """The local folder, or ``.gguf`` file, of an adapter. Files that are not here are fetched.

    Args:
        path: A folder in PEFT's format or a ``.gguf`` file, ``owner/name`` on the hub, or the URL of such a folder.
        may_fetch: Whether anything may be asked of the network; if not, it is what was fetched last.

    Raises:
        ConfigError: There is nothing there, or it cannot be fetched; the message is one line.
    """
    if is_url(path):
        return UrlFolders(sapwood_home() / "adapters" / "url").find(path, FILES, may_fetch=may_fetch)
    local = local_path(path)
    if local.is_dir():
        _check(path, {each.name for each in local.iterdir()})
        return local
    if local.is_file() and local.suffix == ".gguf":
        return local
    name = parse_hub_name(path)
    if local.exists() or name is None or name.file is not None:
        raise ConfigError(
            f"{path!r} is neither a folder with {CONFIG} nor a .gguf file, nor a name on the hub (owner/name), nor a URL"
        )
    return Hub(may_fetch=may_fetch).find_files(name.repo, FILES)


def _check(path: str, names: Collection[str]) -> None:
    for name in FILES:
        if name not in names:
            raise ConfigError(f"{path} holds no {name}, so it is no adapter in PEFT's format")
