#!/usr/bin/env bash
# Checks and measures models whose layers keep states on one CUDA GPU: kernels and tiny models against a CPU, graphs against
# single launches, then true shapes with random weights. Each part is a process of its own with a time limit; what would not end
# within BUDGET seconds (default 570) is left out. JSON lines go to OUT (default: benchmarks/results/gpu-state-<date>.jsonl), the
# tests' output to OUT.tests.
#
#   benchmarks/gpu/state.sh [OUT]
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${1:-benchmarks/results/gpu-state-$(date +%F).jsonl}
python=${PYTHON:-python3}
budget=${BUDGET:-570}
configs=benchmarks/gpu/configs
: >"$out"
part() { # SECONDS COMMAND...
  if ((SECONDS + $1 > budget)); then
    echo "# left out: ${*:2}"
    return
  fi
  echo "# $SECONDS s: ${*:2}"
  timeout -k 5 "$1" "${@:2}" 2>>"$out.err" | tee -a "$out" | sed 's/, "engine".*//' || echo "# FAILED: see $out.err"
}
bench() { part "$1" "$python" benchmarks/gpu/bench_state.py --model "$configs/$2" "${@:3}"; }
timeout -k 5 180 "$python" -m pytest -q -p no:cacheprovider -n 8 tests/kernels/state \
  tests/worker/model/families/state/test_state_kernels.py >"$out.tests" 2>&1
grep -E '^(FAILED|ERROR|E  )|passed|failed' "$out.tests" | cut -c1-250 | tail -n 40
bench 75 lfm2-8b-a1b
bench 75 nemotron-h-8b
bench 90 qwen3-next-80b-a3b-12-layers
bench 90 granite-4.0-h-small-20-layers
bench 60 nemotron-h-8b --no-graphs --batches 1,64 --prefill 0 --profiled 0
bench 75 qwen3-next-80b-a3b-12-layers --quantization fp8 --batches 1,64,256 --profiled 0
echo "# $SECONDS s"
