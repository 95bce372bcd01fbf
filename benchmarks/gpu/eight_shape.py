"""DeepSeek-V3's shape with as many layers as fit, in float8 by blocks, and the least time that GPUs could take for it.

python benchmarks/gpu/eight_shape.py make FOLDER --gpus 8 --memory 143771
python benchmarks/gpu/eight_shape.py floors FOLDER --gpus 8
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

LAYERS = 61
BYTES_A_SECOND, PRODUCTS_A_SECOND = 4.3e12, 1.4e15
"""What an H200 keeps up: bytes read, and floating-point operations with float8 numbers."""
CONTEXT = 1024
TINY = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 100096,
    "kv_lora_rank": 128, "q_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
    "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "n_group": 4, "topk_group": 2,
    "num_hidden_layers": 3,
}  # fmt: skip


class Shape:
    """Args: config: ``config.json`` of a model with latent attention and experts.

    Attributes: by layer, numbers of: attention; expert; dense; and of the embedding, head: a vocabulary's.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        width, heads = config["hidden_size"], config["num_attention_heads"]
        nope, rope, value = (config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        queries, latent = config["q_lora_rank"], config["kv_lora_rank"]
        self.up = latent * heads * (nope + value)
        self.attention = width * (queries + latent + rope) + queries * heads * (nope + rope) + self.up
        self.attention += heads * value * width
        self.expert = 3 * width * config["moe_intermediate_size"]
        self.dense = 3 * width * config["intermediate_size"]
        self.head = width * config["vocab_size"]
        self.layers, self.first = config["num_hidden_layers"], config["first_k_dense_replace"]
        self.sparse = self.layers - self.first

    def weight_bytes(self, experts: float) -> float:
        """Bytes of the weights, of so many experts of each mixture; what is absorbed and the head have two for a number."""
        shared = self.config["n_shared_experts"]
        numbers = self.layers * (self.attention + self.up) + self.first * self.dense
        return numbers + self.sparse * (experts + shared) * self.expert + 2 * self.head

    def hit(self, tokens: int) -> float:
        """How many experts of a mixture so many tokens go to on average, where all are equally likely."""
        experts, chosen = self.config["n_routed_experts"], self.config["num_experts_per_tok"]
        return float(experts * (1 - (1 - chosen / experts) ** tokens))

    def products(self, tokens: int, heads_of: int) -> float:
        """Floating-point operations for so many tokens, of which so many need the head, without attention to others."""
        experts = self.config["num_experts_per_tok"] + self.config["n_shared_experts"]
        met = self.layers * self.attention + self.first * self.dense + self.sparse * experts * self.expert
        return 2.0 * (tokens * met + heads_of * self.head)

    def decode_seconds(self, batch: int, gpus: int) -> float:
        """The least seconds of a step: weights and latents read once, or the products, over all GPUs."""
        cached = batch * CONTEXT * 2 * (self.config["kv_lora_rank"] + self.config["qk_rope_head_dim"]) * self.layers
        read = (self.weight_bytes(self.hit(batch)) + cached) / BYTES_A_SECOND
        return max(read, self.products(batch, batch) / PRODUCTS_A_SECOND) / gpus

    def prefill_seconds(self, tokens: int, gpus: int) -> float:
        """The least seconds of a prompt: its products, with those of attention at half the rate (bfloat16)."""
        sizes = self.config["qk_nope_head_dim"] + self.config["qk_rope_head_dim"] + self.config["v_head_dim"]
        attended = tokens**2 / 2 * 2 * self.config["num_attention_heads"] * sizes * self.layers
        read = self.weight_bytes(self.hit(tokens)) / BYTES_A_SECOND
        return max(read, (self.products(tokens, 1) + 2 * attended) / PRODUCTS_A_SECOND) / gpus


def fitting_layers(gpus: int, memory: int, config: dict[str, Any]) -> int:
    """As many layers as leave a quarter of the memory for the cache and what is computed; in the widest of the ways, in which
    each GPU has attention, embedding and head whole.

    Args:
        gpus: How many.
        memory: MiB of each.
        config: Of the model.
    """
    shape = Shape(config | {"num_hidden_layers": LAYERS, "first_k_dense_replace": 3})
    experts = config["n_routed_experts"] + config["n_shared_experts"]
    each = shape.attention + shape.up + 1.03 * experts * shape.expert / gpus
    room = 0.75 * memory * 2**20 - 4 * shape.head - 3 * shape.dense / gpus
    return max(min(LAYERS, int(room / each) + 2), 4)


def make(folder: Path, gpus: int, memory: int, layers: int) -> None:
    config = json.loads((Path(__file__).parent / "configs/deepseek-v3-4-layers/config.json").read_text())
    if memory:
        config["num_hidden_layers"] = layers or fitting_layers(gpus, memory, config)
        config["first_k_dense_replace"] = min(3, config["num_hidden_layers"] - 1)
    else:
        config |= TINY
    config["quantization_config"] = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3",
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))


def floors(folder: Path, gpus: int) -> None:
    """Prints a JSON line for each figure that ``bench_engine.py`` measures."""
    shape = Shape(json.loads((folder / "config.json").read_text()))
    found = {f"decode {batch}": (shape.decode_seconds(batch, gpus) * 1000, "ms") for batch in (1, 64, 256)}
    found["prefill 1x8192"] = shape.prefill_seconds(8192, gpus) * 1000, "ms"
    draw = random.Random(0)  # as bench_engine.py draws them
    lengths = [(draw.randint(100, 1024), draw.randint(100, 1024)) for _ in range(256)]
    prompts, outputs = (sum(each) for each in zip(*lengths, strict=True))
    steps = (sum(output > step for _, output in lengths) for step in range(1, 1024))
    seconds = sum(shape.decode_seconds(batch, gpus) for batch in steps if batch)
    seconds += shape.products(prompts, 256) / PRODUCTS_A_SECOND / gpus
    found["offline256"] = outputs / seconds, "output tokens/s"
    found["weights"] = shape.weight_bytes(shape.config["n_routed_experts"]) / 1e9, "GB"
    for what, (value, unit) in found.items():
        row = {"what": f"{folder.name} {what} floor", "value": round(value, 4), "unit": unit, "engine": "arithmetic"}
        print(json.dumps(row | {"gpus": gpus, "layers": shape.layers}))


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
        floors(arguments.folder, arguments.gpus)


if __name__ == "__main__":
    main()
