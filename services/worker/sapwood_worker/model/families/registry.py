"""The families of models; packages add theirs as entry points of ``GROUP``, each a ``ModelFamily``."""

from __future__ import annotations

from sapwood_common.plugins import find_part, part_names
from sapwood_worker.model.families.dense.apertus import APERTUS
from sapwood_worker.model.families.dense.cohere import COHERE, COHERE2
from sapwood_worker.model.families.dense.cwm import CWM
from sapwood_worker.model.families.dense.ernie import ERNIE4_5
from sapwood_worker.model.families.dense.exaone4 import EXAONE4
from sapwood_worker.model.families.dense.falcon import FALCON
from sapwood_worker.model.families.dense.gemma import GEMMA, GEMMA2, VAULT_GEMMA
from sapwood_worker.model.families.dense.gemma3 import GEMMA3
from sapwood_worker.model.families.dense.glm import GLM, GLM4
from sapwood_worker.model.families.dense.gpt import GPT2, GPT_BIGCODE, GPT_NEO, OPT
from sapwood_worker.model.families.dense.gpt_neox import GPT_NEOX
from sapwood_worker.model.families.dense.granite import GRANITE, HYPERCLOVA_X
from sapwood_worker.model.families.dense.helium import HELIUM
from sapwood_worker.model.families.dense.hunyuan import HUNYUAN, HUNYUAN_MOE
from sapwood_worker.model.families.dense.latent import MINICPM3, YOUTU
from sapwood_worker.model.families.dense.mistral import MINISTRAL3, MISTRAL
from sapwood_worker.model.families.dense.olmo import OLMO, OLMO2, OLMO3
from sapwood_worker.model.families.dense.phi import GPTJ, PHI
from sapwood_worker.model.families.dense.phi3 import PHI3
from sapwood_worker.model.families.dense.qwen import QWEN2, QWEN3
from sapwood_worker.model.families.dense.relu2 import ARCEE, JAIS2, NEMOTRON
from sapwood_worker.model.families.dense.seed_oss import SEED_OSS
from sapwood_worker.model.families.dense.smollm3 import SMOLLM3
from sapwood_worker.model.families.dense.stablelm import STABLELM
from sapwood_worker.model.families.dense.starcoder2 import STARCODER2
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.llama import LLAMA
from sapwood_worker.model.families.sparse.corrected import DOTS1, EXAONE_MOE, SOLAR_OPEN
from sapwood_worker.model.families.sparse.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from sapwood_worker.model.families.sparse.ernie_moe import ERNIE4_5_MOE
from sapwood_worker.model.families.sparse.glm4_moe import GLM4_MOE, GLM4_MOE_LITE, GLM4V_MOE
from sapwood_worker.model.families.sparse.gpt_oss import GPT_OSS
from sapwood_worker.model.families.sparse.granite_moe import GRANITE_MOE
from sapwood_worker.model.families.sparse.llama4 import LLAMA4
from sapwood_worker.model.families.sparse.minimax import MINIMAX_M2
from sapwood_worker.model.families.sparse.mixtral import MIXTRAL
from sapwood_worker.model.families.sparse.olmoe import FLEX_OLMO, OLMOE
from sapwood_worker.model.families.sparse.qwen_moe import QWEN2_MOE, QWEN3_MOE, QWEN3_VL_MOE
from sapwood_worker.model.families.state.jamba import JAMBA
from sapwood_worker.model.families.state.lfm2 import LFM2, LFM2_MOE
from sapwood_worker.model.families.state.mamba import BAMBA, FALCON_H1, GRANITE_MOE_HYBRID, MAMBA2, NEMOTRON_H
from sapwood_worker.model.families.state.minimax_text import MINIMAX as MINIMAX_TEXT
from sapwood_worker.model.families.state.qwen_next import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT

GROUP = "sapwood.model_families"

_DENSE = (
    *(APERTUS, FALCON, GPT2, GPT_BIGCODE, GPT_NEO, GPT_NEOX, GPTJ, OLMO, OPT, PHI),
    *(
        ARCEE,
        COHERE,
        COHERE2,
        CWM,
        ERNIE4_5,
        EXAONE4,
        GEMMA,
        GEMMA2,
        GEMMA3,
        GLM,
        GLM4,
        GRANITE,
        HELIUM,
        HUNYUAN,
        HYPERCLOVA_X,
        JAIS2,
        LLAMA,
        MINICPM3,
        MINISTRAL3,
        MISTRAL,
    ),
    *(NEMOTRON, OLMO2, OLMO3, PHI3, QWEN2, QWEN3, SEED_OSS, SMOLLM3, STABLELM, STARCODER2, VAULT_GEMMA, YOUTU),
)
_SPARSE = (
    *(
        DEEPSEEK_V2,
        DEEPSEEK_V3,
        DOTS1,
        ERNIE4_5_MOE,
        EXAONE_MOE,
        FLEX_OLMO,
        GLM4_MOE,
        GLM4_MOE_LITE,
        GLM4V_MOE,
        GPT_OSS,
        GRANITE_MOE,
        HUNYUAN_MOE,
    ),
    *(LLAMA4, MINIMAX_M2, MIXTRAL, OLMOE, QWEN2_MOE, QWEN3_MOE, QWEN3_VL_MOE, SOLAR_OPEN),
)
_STATE = (
    *(BAMBA, FALCON_H1, GRANITE_MOE_HYBRID, JAMBA, LFM2, LFM2_MOE, MAMBA2, MINIMAX_TEXT, NEMOTRON_H, QWEN3_5),
    *(QWEN3_5_MOE, QWEN3_NEXT),
)
_FAMILIES = {family.name: family for family in (*_DENSE, *_SPARSE, *_STATE)}


def families() -> tuple[ModelFamily, ...]:
    """All families, those of other packages included.

    Raises:
        ConfigError: A family of another package cannot be imported.
    """
    return tuple(find_part(GROUP, name, _FAMILIES) for name in part_names(GROUP, _FAMILIES))
