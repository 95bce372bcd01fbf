"""Writes docs/checkpoint-keys.md from the lists of what is known of a model's files.

make docs                             writes it
python docs/write_checkpoint_keys.py --check    exits 1 if it is not up to date
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sapwood_tokenizer.vocab.vocabulary_files import (
    READ_SETTINGS,
    READ_WITHOUT_JSON,
    REFUSED_SETTINGS,
    REFUSED_WITHOUT_JSON,
)
from sapwood_worker.model.checkpoint.generation_config import GENERATION
from sapwood_worker.model.checkpoint.hf_config import METHODS
from sapwood_worker.model.checkpoint.sentence_config import SENTENCE_FILES
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.known_keys import CONFIG, GGUF, Allowed, KnownKeys, Same
from sapwood_worker.model.families.registry import families
from sapwood_worker.model.families.values import HfValues, Settings

_PAGE = Path(__file__).parent / "checkpoint-keys.md"
_HEAD = """# Settings of a model's files

<!-- Written by docs/write_checkpoint_keys.py (make docs): change the lists in the code. -->

What a file says and nothing reads is refused by its name, because it may change what the model computes. `null`, `false` and
what is empty say nothing. A setting that is *harmless* changes no number of ours. To serve a model in spite of a setting that is
refused, remove it from the file.

"""
_NEEDED: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "glm4_moe": {"head_dim": 128},
    "nemotron_h": {"layers_block_type": ["mamba", "mlp", "attention"]},
    "glm4v_moe_text": {"head_dim": 128},
}


def _read_by(family: ModelFamily) -> list[str]:
    """What a family looks up in the configuration that transformers writes by default."""
    served = set(family.architectures)
    kinds = _kinds()
    of_texts = (kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if name in served and kind in kinds)
    kind = next(of_texts, family.name)  # the text part of a wrapped model has its own name alone
    settings = Settings(CONFIG_MAPPING[kind](**_NEEDED.get(kind, {})).to_dict())
    family.from_hf(HfValues(family.name, settings, settings.over(family.defaults)))
    return sorted(settings.reads.names)


def _kinds() -> set[str]:
    foreign = {"exaone", "internlm3", "iquestcoder", "sarvam_mla", "sarvam_moe", "gemma3", "llama4"}
    foreign |= {"qwen3_5", "qwen3_5_moe"}  # wrappers
    return set(CONFIG_MAPPING) - foreign


def _limits(limited: Mapping[str, Allowed]) -> Iterator[str]:
    for name, allowed in sorted(limited.items()):
        if isinstance(allowed, Same):
            yield f"`{name}` if it says what `{allowed.key}` says"
        elif allowed:
            yield f"`{name}` {' or '.join(f'`{each}`' for each in allowed)}"
        else:
            yield f"`{name}`"


def _listed(keys: KnownKeys) -> Iterator[str]:
    if keys.read:
        yield f"- **read**: {', '.join(f'`{name}`' for name in sorted(keys.read))}"
    for reason, names in keys.harmless.items():
        yield f"- **harmless**, {reason}: {', '.join(f'`{name}`' for name in names.split())}"
    if keys.limited:
        yield f"- **harmless with these values**: {', '.join(_limits(keys.limited))}"


def page() -> str:
    """The page."""
    lines = [_HEAD + "## config.json\n"]
    lines += _listed(CONFIG)
    lines += ["", "| family | read | harmless |", "|---|---|---|"]
    for family in sorted(families(), key=lambda each: each.name):
        names = ", ".join(f"`{name}`" for name in _read_by(family))
        lines.append(f"| {family.name} | {names} | {', '.join(_limits(family.unread))} |")
    lines.append(
        "\nOf a wrapper around a language model (`text_config`), the wrapper's own settings are not looked at."
    )
    lines.append("\n## quantization_config\n")
    first = next(iter(METHODS.values()))
    lines += _listed(KnownKeys("", (), first.harmless))
    for name, keys in METHODS.items():
        own = KnownKeys("", tuple(each for each in keys.read if each != "quant_method"), {}, keys.limited)
        lines += [f"\n`{name}`:\n", *_listed(own)]
    lines.append(f"\n## {GGUF.file}\n")
    lines.append("- **read**: what the families of [gguf.md](gguf.md) look up")
    lines += _listed(GGUF)
    for each in (GENERATION, *SENTENCE_FILES):
        lines += [f"\n## {each.file}\n", *_listed(each)]
    lines += ["\n## tokenizer_config.json\n", *_tokenizer_settings()]
    return "\n".join(lines) + "\n"


def _tokenizer_settings() -> Iterator[str]:
    yield f"- **read**: {_names(READ_SETTINGS)}; where there is no tokenizer.json {_names(READ_WITHOUT_JSON)}, too"
    yield "- **refused**: " + "; ".join(f"`{name}` if it is true ({why})" for name, why in REFUSED_SETTINGS.items())
    without = "; ".join(f"`{name}` ({why})" for name, why in REFUSED_WITHOUT_JSON.items())
    yield f"- **refused** of a SentencePiece `tokenizer.model`: {without}"
    yield (
        "- **harmless**: all others, whatever their names. A tokenizer's class may take any setting, and tokenizer.json says\n"
        "  alone how a text becomes tokens: transformers leaves the others to that file, too. Spaces in decoded text are not\n"
        "  cleaned up (`clean_up_tokenization_spaces`)"
    )


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def main() -> int:
    """Writes the page, or compares it."""
    if "--check" in sys.argv[1:]:
        return int(not _PAGE.is_file() or _PAGE.read_text() != page())
    _PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
