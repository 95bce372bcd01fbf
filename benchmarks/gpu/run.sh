#!/usr/bin/env bash
# Checks and measures everything on one CUDA GPU: kernels against references, models against transformers, then both benchmark
# models, overlapped and step by step, and the KV cache's second tier. JSON lines go to OUT (default: benchmarks/results/gpu-<date>.jsonl); the table to the screen.
#
#   benchmarks/gpu/run.sh [OUT]
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-benchmarks/results/gpu-$(date +%F).jsonl}
: >"$out"
python -m pytest -q -p no:cacheprovider tests/kernels
for model in qwen3-0.6b llama-3.1-8b; do
  config=benchmarks/gpu/configs/$model
  workloads=decode,prefill,offline
  [ "$model" = llama-3.1-8b ] || workloads=$workloads,sampled
  python benchmarks/gpu/bench_engine.py --model "$config" --only "$workloads" | tee -a "$out"
  python benchmarks/gpu/bench_engine.py --model "$config" --only offline --no-overlap | tee -a "$out"
done
python benchmarks/gpu/check_correctness.py | tee -a "$out"
PYTHON=python benchmarks/gpu/tiers.sh "${out%.jsonl}-tiers.jsonl"
python benchmarks/gpu/table.py "$out"
