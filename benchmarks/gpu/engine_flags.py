"""The flags of bench_engine.py, and what a model is called that is measured with them."""

from __future__ import annotations

import argparse
from pathlib import Path

from sapwood_worker.records.model_info import SUM_METHODS


def variant_of(given: argparse.Namespace) -> str:
    """The model's name and what is not as usual."""
    named = {
        given.quantization: given.quantization != "none",
        "fp8-kv": given.kv_cache_dtype != "auto",
        "tuned": given.expert_tuning,
        f"tp{given.tensor_parallel}": given.tensor_parallel > 1,
        given.all_reduce: given.all_reduce != "auto",
        "ep": given.expert_parallel,
        "dp-attention": given.data_parallel_attention,
        given.expert_dispatch: given.expert_dispatch != "gather",
        f"pp{given.pipeline_parallel}": given.pipeline_parallel > 1,
        f"micro_batches-{given.micro_batches}": given.micro_batches != "auto",
    }
    return "+".join((given.model.name, *(name for name, unusual in named.items() if unusual)))


def parse_arguments(description: str) -> argparse.Namespace:
    """The flags, checked."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Folder with a config.json.")
    parser.add_argument("--only", default="decode,sampled,prefill,offline", help="Which workloads (default: all).")
    parser.add_argument("--batches", default="1,64,256", help="Of the workload decode (default: 1,64,256).")
    parser.add_argument(
        "--repeats", type=int, default=2, help="Of each timing of decode; the best counts (default: 2)."
    )
    parser.add_argument("--both-loops", action="store_true", help="Offline step by step too, after the overlapped one.")
    parser.add_argument("--no-overlap", action="store_true", help="Step by step: the host waits for each.")
    parser.add_argument("--kv-gb", type=float, default=60.0, help="KV cache in GiB (default: 60); 0: what is left.")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8_e4m3"), default="auto", help="Of the KV cache.")
    parser.add_argument(
        "--quantization",
        choices=("none", "fp8", "fp8_block", "fp8_tensor", "int8", "int4"),
        default="none",
        help="Of the linear layers.",
    )
    parser.add_argument("--attention-backend", default="auto", help="As the worker takes it (default: auto).")
    parser.add_argument(
        "--as-a-worker",
        action="store_true",
        help="Does not wait for FlashInfer's libraries, as a worker does not: until they are compiled Triton computes prompts.",
    )
    parser.add_argument(
        "--routing", choices=("own", "uniform"), default="own", help="How tokens get experts (default: own)."
    )
    parser.add_argument(
        "--expert-tuning", type=float, default=0.0, help="Seconds to measure experts' tiles in (default: none)."
    )
    parser.add_argument(
        "--prefills", default="1x128,1x1024,1x8192,16x8192", help="Of the workload prefill (default: %(default)s)."
    )
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs to split the model over (default: 1).")
    parser.add_argument(
        "--expert-parallel", action="store_true", help="Ranks have whole experts (default: a part of each)."
    )
    parser.add_argument(
        "--data-parallel-attention",
        action="store_true",
        help="Ranks have requests of their own (default: all have all).",
    )
    parser.add_argument(
        "--expert-dispatch",
        choices=("gather", "direct", "direct-float8"),
        default="gather",
        help="How rows go to experts with --data-parallel-attention (default: gather).",
    )
    parser.add_argument(
        "--all-reduce", choices=("auto", *SUM_METHODS[:3]), default="auto", help="What sums over ranks (default: auto)."
    )
    parser.add_argument(
        "--diverging-rank", type=int, default=-1, help="One that gets other numbers than the others: the run must fail."
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to try it (default: cuda)."
    )
    parser.add_argument("--pipeline-parallel", type=int, default=1, help="Stages, each of so many GPUs (default: 1).")
    parser.add_argument(
        "--micro-batches",
        choices=("auto", "always", "off"),
        default="auto",
        help="Whether stages compute several steps at once (default: where a trial says that it pays).",
    )
    parser.add_argument(
        "--graph-sizes",
        type=lambda text: tuple(map(int, text.split(","))),
        default=(),
        help="Batches whose decodes are captured, for a quicker start (default: as a worker has them).",
    )
    parser.add_argument(
        "--turn", type=Path, help="File whose lock is held while the GPUs are used, for what is started meanwhile."
    )
    parser.add_argument(
        "--profile", type=Path, help="Folder for Chrome traces of steps; also prints their time by part."
    )
    arguments = parser.parse_args()
    if arguments.device == "cpu" and (arguments.routing == "uniform" or arguments.profile is not None):
        parser.error("--routing uniform, --profile: only on GPUs")
    return arguments
