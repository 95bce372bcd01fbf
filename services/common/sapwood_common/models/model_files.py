"""Where model files are kept and which file or folder a model name stands for."""

from __future__ import annotations

import os
from pathlib import Path

from sapwood_common.errors import ConfigError

DEMO_NAME = "demo"
DEMO_FILE = "gemma-3-270m-q4_k_m.gguf"


def sapwood_home() -> Path:
    """The cache folder: ``SAPWOOD_HOME``, else ``~/.cache/sapwood``."""
    return Path(os.environ.get("SAPWOOD_HOME") or Path.home() / ".cache" / "sapwood")


def demo_path() -> Path:
    """Where ``sapwood model fetch demo`` puts the demo model."""
    return sapwood_home() / "models" / DEMO_NAME / DEMO_FILE


def resolve_model(model: str) -> Path:
    """The file or folder that ``--model`` names: ``demo``, a ``.gguf`` file or a Hugging Face directory.

    Raises:
        ConfigError: There is nothing there; the message says what to do.
    """
    if model == DEMO_NAME:
        path = demo_path()
        if not path.is_file():
            raise ConfigError(f"--model: the demo model is not at {path}; fetch it with: sapwood model fetch demo")
        return path
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"--model: {path} holds no config.json, so it is not a Hugging Face model directory")
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(f"--model: {path} is neither a .gguf file nor a directory")
        return path
    raise ConfigError(f"--model: {model!r} is neither 'demo' nor an existing .gguf file or model directory")


def model_name(model: str) -> str:
    """The name clients use for a model unless the configuration gives another: ``demo``, or the file's or folder's own name."""
    return model if model == DEMO_NAME else resolve_model(model).name.removesuffix(".gguf")
