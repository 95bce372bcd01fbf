#!/usr/bin/env bash
# Checks and measures the KV cache's second tier on one CUDA GPU, in about three minutes. Each part is a process of its own with a
# time limit. JSON lines go to OUT (default: benchmarks/results/gpu-tiers-<date>.jsonl).
#
#   benchmarks/gpu/tiers.sh [OUT]
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${1:-benchmarks/results/gpu-tiers-$(date +%F).jsonl}
python=${PYTHON:-python3}
: >"$out"
part() { # SECONDS COMMAND...
  echo "# $(date +%T) ${*:2}"
  timeout -k 5 "$1" "${@:2}" 2>>"$out.err" | tee -a "$out" | sed 's/, "engine".*//'
}
part 60 "$python" benchmarks/gpu/bench_page_copies.py
part 75 "$python" benchmarks/gpu/checks/check_tiers.py --model benchmarks/gpu/configs/qwen3-0.6b
part 150 "$python" benchmarks/gpu/bench_tiers.py --model benchmarks/gpu/configs/llama-3.1-8b
echo "# $(date +%T)"
