"""The facts in a model's files, read only from their headers."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sapwood_common.models.gguf_file import GgufFile
from sapwood_common.models.json_file import read_json_object


def model_facts(path: Path) -> dict[str, str]:
    """Names and values to show, in order.

    Raises:
        ConfigError: ``config.json`` cannot be read.
        GgufError: The file is no GGUF file.
    """
    return {"path": str(path), **(_of_folder(path) if path.is_dir() else _of_gguf(path))}


def _of_gguf(path: Path) -> dict[str, str]:
    import gguf

    file = GgufFile(path)
    try:
        data, kind = file.metadata, str(file.metadata.get("general.architecture", "unknown"))
        formats = Counter(gguf.GGMLQuantizationType(each.type).name for each in file.tensors.values())
        weights = sum(math.prod(each.shape) for each in file.tensors.values())
        return _shown(
            {
                "name": data.get("general.name"),
                "architecture": kind,
                "parameters": weights,
                "format": "GGUF, " + ", ".join(f"{count} {name}" for name, count in formats.most_common()),
                "size": sum(each.stat().st_size for each in file.paths),
                "context": data.get(f"{kind}.context_length"),
                "layers": data.get(f"{kind}.block_count"),
                "hidden size": data.get(f"{kind}.embedding_length"),
                "vocabulary": len(data.get("tokenizer.ggml.tokens", ())),
                "chat template": "yes" if data.get("tokenizer.chat_template") else "no: it continues texts",
                "licence": data.get("general.license"),
            }
        )
    finally:
        file.close()


def _of_folder(path: Path) -> dict[str, str]:
    config = read_json_object(path / "config.json")
    inner = config.get("text_config")
    text = inner if isinstance(inner, dict) else config
    tensors = list(_safetensors(path.glob("*.safetensors")))
    formats = Counter[str]()
    for kind, count in tensors:
        formats[kind] += count
    template = (path / "chat_template.jinja").is_file() or '"chat_template"' in _text(path / "tokenizer_config.json")
    quantized = config.get("quantization_config")
    method = quantized.get("quant_method") if isinstance(quantized, dict) else None
    return _shown(
        {
            "architecture": ", ".join(map(str, config.get("architectures") or ())) or config.get("model_type"),
            "parameters": sum(formats.values()),
            "format": ", ".join(["safetensors", *filter(None, [method]), *formats]),
            "size": sum(each.stat().st_size for each in path.iterdir() if each.is_file()),
            "context": text.get("max_position_embeddings"),
            "layers": text.get("num_hidden_layers"),
            "hidden size": text.get("hidden_size"),
            "vocabulary": text.get("vocab_size"),
            "chat template": "yes" if template else "no: it continues texts",
        }
    )


def _safetensors(files: Iterable[Path]) -> Iterable[tuple[str, int]]:
    """Data type and number of elements of each tensor; files whose header is damaged have none."""
    for path in files:
        try:
            with path.open("rb") as file:
                (size,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(min(size, 100 << 20)))
            yield from (
                (each["dtype"], math.prod(each["shape"])) for name, each in header.items() if name != "__metadata__"
            )
        except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError):
            continue


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _shown(facts: dict[str, Any]) -> dict[str, str]:
    words: dict[str, str] = {}
    for name, value in facts.items():
        if value in (None, 0, ""):
            continue
        if name == "parameters":
            words[name] = f"{value / 1e9:.2f} billion" if value >= 1e9 else f"{value / 1e6:.1f} million"
        elif name == "size":
            words[name] = f"{value / 1e6:.1f} MB"
        else:
            words[name] = f"{value} tokens" if name == "context" else str(value)
    return words
