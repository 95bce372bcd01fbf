"""What settings about a model need to have an effect."""

from __future__ import annotations

from sapwood_common.models.model_files import hub_name
from sapwood_common.settings.needs import Needs

OF_HUB = Needs(
    ("revision",), lambda config: hub_name(config.model) is not None, "unless {model} names a model of the hub"
)
