"""What ``--deterministic`` does not go together with yet: settings and models, each with the reason."""

from __future__ import annotations

from sapwood_common.errors import ConfigError
from sapwood_worker.config import WorkerConfig
from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.runner.state_refusals import Refusal

REFUSED = (
    Refusal(
        "--tensor-parallel",
        lambda config: config.tensor_parallel > 1,
        "how sums over ranks are computed depends on their size",
    ),
    Refusal(
        "--pipeline-parallel", lambda config: config.pipeline_parallel.stages > 1, "stages cut steps by their length"
    ),
    Refusal(
        "--quantization",
        lambda config: config.quantization != "none",
        "products with quantised weights are chosen by the number of rows",
    ),
    Refusal(
        "--lora-slots",
        lambda config: config.lora_slots.slots > 0,
        "adapters' products are chosen by the number of rows",
    ),
    Refusal(
        "--speculate",
        lambda config: config.speculate not in ("auto", "prefix", "off"),
        "what a draft model proposes depends on its batch",
    ),
)
"""By flag."""


def refuse_for_determinism(config: WorkerConfig, model: ModelConfig, device: str) -> None:
    """Refuses what would make a request's tokens depend on others.

    Raises:
        ConfigError: ``--deterministic`` is given, with a setting of :data:`REFUSED` or a model of another kind; names it and why.
    """
    if not config.deterministic:
        return
    found = [f"{each.flag}: {each.why}" for each in REFUSED if each.given(config)]
    kinds = {
        "experts": model.sparse is not None,
        "latent attention": model.latent is not None,
        "layers that keep states": bool(model.state_layers),
    }
    found += [f"{model.architecture} has {kind}" for kind, has in kinds.items() if has]
    if device == "cpu" and config.dtype not in ("auto", "float32"):
        found.append(f"--dtype {config.dtype} on a CPU: its attention computes in float32")
    if found:
        raise ConfigError(f"--deterministic does not go with {'; '.join(found)}")
