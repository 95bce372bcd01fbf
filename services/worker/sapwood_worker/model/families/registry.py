"""The families of models; packages add theirs as entry points of ``GROUP``, each a ``ModelFamily``."""

from __future__ import annotations

from sapwood_common.plugins import find_part, part_names
from sapwood_worker.model.families.dense.cohere import COHERE, COHERE2
from sapwood_worker.model.families.dense.ernie import ERNIE4_5
from sapwood_worker.model.families.dense.exaone4 import EXAONE4
from sapwood_worker.model.families.dense.gemma import GEMMA, GEMMA2
from sapwood_worker.model.families.dense.gemma3 import GEMMA3
from sapwood_worker.model.families.dense.glm import GLM, GLM4
from sapwood_worker.model.families.dense.granite import GRANITE
from sapwood_worker.model.families.dense.latent import MINICPM3, YOUTU
from sapwood_worker.model.families.dense.mistral import MISTRAL
from sapwood_worker.model.families.dense.olmo import OLMO2, OLMO3
from sapwood_worker.model.families.dense.phi3 import PHI3
from sapwood_worker.model.families.dense.qwen import QWEN2, QWEN3
from sapwood_worker.model.families.dense.relu2 import ARCEE, NEMOTRON
from sapwood_worker.model.families.dense.smollm3 import SMOLLM3
from sapwood_worker.model.families.dense.stablelm import STABLELM
from sapwood_worker.model.families.dense.starcoder2 import STARCODER2
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.llama import LLAMA
from sapwood_worker.model.families.sparse.corrected import DOTS1, EXAONE_MOE, SOLAR_OPEN
from sapwood_worker.model.families.sparse.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from sapwood_worker.model.families.sparse.ernie_moe import ERNIE4_5_MOE
from sapwood_worker.model.families.sparse.glm4_moe import GLM4_MOE, GLM4_MOE_LITE
from sapwood_worker.model.families.sparse.gpt_oss import GPT_OSS
from sapwood_worker.model.families.sparse.llama4 import LLAMA4
from sapwood_worker.model.families.sparse.minimax import MINIMAX_M2
from sapwood_worker.model.families.sparse.mixtral import MIXTRAL
from sapwood_worker.model.families.sparse.olmoe import FLEX_OLMO, OLMOE
from sapwood_worker.model.families.sparse.qwen_moe import QWEN2_MOE, QWEN3_MOE

GROUP = "sapwood.model_families"

_DENSE = (
    *(ARCEE, COHERE, COHERE2, ERNIE4_5, EXAONE4, GEMMA, GEMMA2, GEMMA3, GLM, GLM4, GRANITE, LLAMA, MINICPM3, MISTRAL),
    *(NEMOTRON, OLMO2, OLMO3, PHI3, QWEN2, QWEN3, SMOLLM3, STABLELM, STARCODER2, YOUTU),
)
_SPARSE = (
    *(DEEPSEEK_V2, DEEPSEEK_V3, DOTS1, ERNIE4_5_MOE, EXAONE_MOE, FLEX_OLMO, GLM4_MOE, GLM4_MOE_LITE, GPT_OSS),
    *(LLAMA4, MINIMAX_M2, MIXTRAL, OLMOE, QWEN2_MOE, QWEN3_MOE, SOLAR_OPEN),
)
_FAMILIES = {family.name: family for family in (*_DENSE, *_SPARSE)}


def families() -> tuple[ModelFamily, ...]:
    """All families, those of other packages included.

    Raises:
        ConfigError: A family of another package cannot be imported.
    """
    return tuple(find_part(GROUP, name, _FAMILIES) for name in part_names(GROUP, _FAMILIES))
