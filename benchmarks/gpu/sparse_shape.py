"""Shapes of sparse models, tiny or with as many layers as fit, and the least time that GPUs could take for them.

python benchmarks/gpu/sparse_shape.py make FOLDER --gpus 8 --memory 143771
python benchmarks/gpu/sparse_shape.py floors FOLDER --gpus 8
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parent / "configs"
LAYERS = 61
BYTES_A_SECOND, PRODUCTS_A_SECOND = 4.3e12, 0.7e15
"""What an H200 keeps up: bytes read, and floating-point operations with numbers of 16 bits, half of those with float8."""
CONTEXT = 1024
TINY = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 100096,
    "num_experts_per_tok": 4, "moe_intermediate_size": 256, "num_hidden_layers": 3,
}  # fmt: skip
TINY_LATENT = {
    "kv_lora_rank": 128, "q_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
    "n_routed_experts": 16, "n_group": 4, "topk_group": 2,
}  # fmt: skip
TINY_GROUPED = {"head_dim": 64, "num_experts": 16}


class Shape:
    """Args: config: ``config.json`` of a model with experts, and latent attention or heads in groups.

    Attributes: experts, shared: of a mixture; by layer, numbers of: attention; of it once more, for what is absorbed: up; expert;
    dense; cached by a token; head: of the embedding, and of the output head.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.float8 = "quantization_config" in config
        width, heads = config["hidden_size"], config["num_attention_heads"]
        self.experts, self.shared = (
            config.get("n_routed_experts") or config["num_experts"],
            config.get("n_shared_experts", 0),
        )
        if "kv_lora_rank" in config:
            nope, rope, value = (config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
            queries, latent = config["q_lora_rank"], config["kv_lora_rank"]
            self.up = latent * heads * (nope + value)
            self.attention = width * (queries + latent + rope) + queries * heads * (nope + rope) + self.up
            self.attention += heads * value * width
            self.cached, self.met = latent + rope, heads * (nope + rope + value)
        else:
            size, groups = config["head_dim"], config["num_key_value_heads"]
            self.up = 0
            self.attention = 2 * width * size * (heads + groups)
            self.cached, self.met = 2 * size * groups, 2 * heads * size
        self.expert = 3 * width * config["moe_intermediate_size"]
        self.dense = 3 * width * config["intermediate_size"]
        self.head = width * config["vocab_size"]
        self.layers, self.first = config["num_hidden_layers"], config.get("first_k_dense_replace", 0)
        self.sparse = self.layers - self.first

    def weight_bytes(self, experts: float) -> float:
        """Bytes of the weights, of so many experts of each mixture; what is absorbed and the head have two for a number."""
        numbers = self.layers * (self.attention + self.up) + self.first * self.dense
        numbers += self.sparse * (experts + self.shared) * self.expert
        return numbers * (1 if self.float8 else 2) + 2 * self.head

    def hit(self, tokens: int) -> float:
        """How many experts of a mixture so many tokens go to on average, where all are equally likely."""
        chosen = self.config["num_experts_per_tok"]
        return float(self.experts * (1 - (1 - chosen / self.experts) ** tokens))

    def product_seconds(self, tokens: int, heads_of: int) -> float:
        """Seconds of a GPU for products of so many tokens, of which so many need the head, without attention to others."""
        experts = self.config["num_experts_per_tok"] + self.shared
        met = self.layers * self.attention + self.first * self.dense + self.sparse * experts * self.expert
        return 2.0 * (tokens * met + heads_of * self.head) / (PRODUCTS_A_SECOND * (2 if self.float8 else 1))

    def decode_seconds(self, batch: int, gpus: int) -> float:
        """The least seconds of a step: weights and cached numbers read once, or the products, over all GPUs."""
        read = (self.weight_bytes(self.hit(batch)) + batch * CONTEXT * 2 * self.cached * self.layers) / BYTES_A_SECOND
        return max(read, self.product_seconds(batch, batch)) / gpus

    def prefill_seconds(self, tokens: int, gpus: int) -> float:
        """The least seconds of a prompt: its products, those of attention with numbers of 16 bits."""
        attended = tokens**2 / 2 * 2 * self.met * self.layers / PRODUCTS_A_SECOND
        read = self.weight_bytes(self.hit(tokens)) / BYTES_A_SECOND
        return max(read, self.product_seconds(tokens, 1) + attended) / gpus


def fitting_layers(gpus: int, memory: int, config: dict[str, Any]) -> int:
    """As many layers as leave a quarter of the memory, 22 GB at the least, for the cache and what is computed; in the widest of
    the ways, in which each GPU has attention, shared experts, embedding and head whole.

    Args:
        gpus: How many.
        memory: MiB of each.
        config: Of the model.
    """
    shape = Shape(config | {"num_hidden_layers": LAYERS, "first_k_dense_replace": 3, "quantization_config": {}})
    each = shape.attention + shape.up + (1.03 * shape.experts / gpus + shape.shared) * shape.expert
    whole = memory * 2**20
    room = min(0.75 * whole, 0.9 * whole - 22e9) - 4 * shape.head - 3 * shape.dense / gpus
    return max(min(LAYERS, int(room / each) + 2), 4)


def make(folder: Path, gpus: int, memory: int, layers: int) -> None:
    """Writes the configuration of DeepSeek-V3's shape in float8 by blocks; of a tiny one if there is no memory."""
    config = json.loads((CONFIGS / "deepseek-v3-4-layers/config.json").read_text())
    if memory:
        config["num_hidden_layers"] = layers or fitting_layers(gpus, memory, config)
        config["first_k_dense_replace"] = min(3, config["num_hidden_layers"] - 1)
    else:
        config |= TINY | TINY_LATENT
    config["quantization_config"] = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3",
    }  # fmt: skip
    _write(folder, config)


def make_tiny(folder: Path, name: str) -> None:
    """Writes a tiny configuration of a shape with heads in groups.

    Args:
        folder: Where.
        name: The shape's, in ``configs``.
    """
    _write(folder, json.loads((CONFIGS / name / "config.json").read_text()) | TINY | TINY_GROUPED)


def _write(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))


def floors(folder: Path, gpus: int) -> list[dict[str, Any]]:
    """A row for each figure that ``bench_engine.py`` measures."""
    shape = Shape(json.loads((folder / "config.json").read_text()))
    found = {f"decode {batch} steady": (shape.decode_seconds(batch, gpus) * 1000, "ms") for batch in (1, 64, 256)}
    found["prefill 1x8192"] = shape.prefill_seconds(8192, gpus) * 1000, "ms"
    draw = random.Random(0)  # as bench_engine.py draws them
    lengths = [(draw.randint(100, 1024), draw.randint(100, 1024)) for _ in range(256)]
    prompts, outputs = (sum(each) for each in zip(*lengths, strict=True))
    steps = (sum(output > step for _, output in lengths) for step in range(1, 1024))
    seconds = sum(shape.decode_seconds(batch, gpus) for batch in steps if batch)
    seconds += shape.product_seconds(prompts, 256) / gpus
    found["offline256"] = outputs / seconds, "output tokens/s"
    found["weights"] = shape.weight_bytes(shape.experts) / 1e9, "GB"
    more = {"engine": "arithmetic", "gpus": gpus, "layers": shape.layers}
    return [
        {"what": f"{folder.name} floor {what}", "value": round(value, 4), "unit": unit} | more
        for what, (value, unit) in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("make", "floors"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--memory", type=int, default=0, help="MiB of a GPU; 0: a tiny shape for a CPU (default).")
    parser.add_argument("--layers", type=int, default=0, help="How many (default: as many as fit).")
    arguments = parser.parse_args()
    if arguments.command == "make":
        make(arguments.folder, arguments.gpus, arguments.memory, arguments.layers)
    else:
        for row in floors(arguments.folder, arguments.gpus):
            print(json.dumps(row))


if __name__ == "__main__":
    main()
