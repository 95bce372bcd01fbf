"""The families of encoders."""

from __future__ import annotations

from pathlib import Path

from sapwood_common.errors import ConfigError
from sapwood_common.models.json_file import read_json_object
from sapwood_worker.model.families.encoders.bert import BERT, DISTILBERT, MPNET, ROBERTA
from sapwood_worker.model.families.encoders.encoder import EncoderFamily
from sapwood_worker.model.families.encoders.gemma import GEMMA_ENCODER
from sapwood_worker.model.families.encoders.modern_bert import MODERN_BERT

ENCODERS = (BERT, ROBERTA, MPNET, DISTILBERT, MODERN_BERT, GEMMA_ENCODER)


def encoder_family(path: Path) -> EncoderFamily | None:
    """The family of the encoder in a Hugging Face directory; None: it holds another model.

    Raises:
        ConfigError: It holds one with a head that is not served.
    """
    file = path / "config.json"
    if not file.is_file():
        return None
    values = read_json_object(file)
    name = str((values.get("architectures") or [""])[0])
    for family in ENCODERS:
        if family.answers is not None:
            if name in family.architectures and family.answers(values):
                return family
        elif name in family.architectures:
            return family
        elif family.has_other_head(name):
            served = ", ".join(family.architectures)
            raise ConfigError(f"{file}: architecture {name} has a head that is not supported (supported: {served})")
    return None
