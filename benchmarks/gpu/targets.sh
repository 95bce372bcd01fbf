#!/usr/bin/env bash
# The targets of the engine on one H200, in one run, with the worker's defaults; then with flags, for how far the defaults are from
# them. The first process finds empty caches: it is the 8B's cold start, and what it compiles serves the others. JSON lines in OUT, then
# a table beside the targets, d3c93b6 and vLLM. Five minutes, of which 100 s are FlashInfer's compilers; each process has its own limit,
# and what would not end within BUDGET seconds (default 360) is left out. What was compiled is thrown away, or kept in the folder CACHES.
#
#   benchmarks/gpu/targets.sh [OUT]
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${1:-benchmarks/results/targets-$(date +%F).jsonl}
python=${PYTHON:-python}
configs=benchmarks/gpu/configs
best=${BEST_FLAGS:---max-running 256 --max-step-tokens 8192 --kv-cache-gb 60 --context-length 16384 --speculate off}
caches=${CACHES:-$(mktemp -d)}
[ -n "${CACHES:-}" ] || trap 'rm -rf "$caches"' EXIT
export TRITON_CACHE_DIR=$caches/triton FLASHINFER_WORKSPACE_BASE=$caches CUDA_CACHE_PATH=$caches/cuda
: >"$out"
: >"$out.err"
measure() { # SECONDS AT_MOST MODEL FLAGS...: what it takes about, and its limit
  if ((SECONDS + $1 > ${BUDGET:-360})); then
    echo "# left out: ${*:3}"
    return
  fi
  timeout -k 5 "$2" "$python" benchmarks/gpu/bench_targets.py --model "$configs/$3" "${@:4}" 2>>"$out.err" | tee -a "$out"
}
measure 110 170 llama-3.1-8b --cold
measure 60 90 llama-3.1-8b
measure 40 60 qwen3-0.6b
measure 60 90 llama-3.1-8b --flags "$best"
measure 30 60 qwen3-0.6b --flags "$best"
"$python" benchmarks/gpu/bench_targets.py --table "$out"
