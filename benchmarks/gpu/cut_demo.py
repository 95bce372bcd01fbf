"""Cuts the demo model down to what travels: its first layers and tokens, as they are stored. Real weights, meaningless text.

For check_correctness.py --cut-demo where the whole model cannot be carried.

    python benchmarks/gpu/cut_demo.py OUT.gguf
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf

from sapwood_common.models.model_files import resolve_model

ARCHITECTURE = "gemma3"
KEYS = {
    "context_length": int, "embedding_length": int, "feed_forward_length": int, "attention.head_count": int,
    "attention.head_count_kv": int, "attention.key_length": int, "attention.value_length": int,
    "attention.sliding_window": int, "attention.layer_norm_rms_epsilon": float, "rope.freq_base": float,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=6, help="How many (default: 6, the sixth without a window).")
    parser.add_argument("--tokens", type=int, default=4096, help="How many (default: 4096).")
    arguments = parser.parse_args()
    reader = gguf.GGUFReader(resolve_model("demo-base"))
    writer = gguf.GGUFWriter(arguments.out, ARCHITECTURE)
    writer.add_block_count(arguments.layers)
    for key, kind in KEYS.items():
        field = reader.fields.get(f"{ARCHITECTURE}.{key}")
        if field is not None:
            add = writer.add_uint32 if kind is int else writer.add_float32
            add(f"{ARCHITECTURE}.{key}", kind(field.parts[field.data[0]][0]))
    for tensor in reader.tensors:
        parts = tensor.name.split(".")
        if parts[0] == "blk" and int(parts[1]) >= arguments.layers:
            continue
        data = tensor.data[: arguments.tokens] if tensor.name == "token_embd.weight" else tensor.data
        writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(f"{arguments.out}: {arguments.out.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
