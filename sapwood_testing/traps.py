"""A folder whose Python files have the names of modules that Sapwood imports, as somebody's model may come with."""

from __future__ import annotations

from pathlib import Path

_NAMES = (
    *(
        "asyncio",
        "google",
        "grpc",
        "httptools",
        "huggingface_hub",
        "jinja2",
        "json",
        "llguidance",
        "msgspec",
        "multiprocessing",
    ),
    *(
        "numpy",
        "pip",
        "prometheus_client",
        "pydantic",
        "pydantic_settings",
        "queue",
        "random",
        "safetensors",
        "sentencepiece",
    ),
    *("sitecustomize", "tokenizers", "torch", "triton", "usercustomize", "uvloop", "xxhash", "yaml", "zmq"),
    *("sapwood", "sapwood_common", "sapwood_kernels", "sapwood_router", "sapwood_tokenizer", "sapwood_worker"),
)


def lay_traps(folder: Path, *without: str) -> Path:
    """Puts a trap into a folder for each module; returns the file in which a trap that is run notes its name.

    Args:
        folder: Where processes are started.
        without: Modules that get none.
    """
    sprung = folder / "sprung.txt"
    for name in set(_NAMES) - set(without):
        trap = f"open({str(sprung)!r}, 'a').write({name!r} + '\\n')\nraise ImportError('a trap')\n"
        if name.startswith("sapwood"):
            (folder / name).mkdir()
            (folder / name / "__init__.py").write_text(trap)
        else:
            (folder / f"{name}.py").write_text(trap)
    return sprung
