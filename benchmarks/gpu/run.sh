#!/usr/bin/env bash
# Checks and measures everything on one CUDA GPU: kernels against references and models against transformers, then for both
# benchmark models the engine alone and all services, as JSON lines in OUT (default: benchmarks/results/gpu-<date>.jsonl) and as a
# table. Each part is a process of its own with a time limit; one that fails does not take the others with it, but the exit code
# says so. What would not end within BUDGET seconds (default 540) is left out. CUT_DEMO: the demo model cut to a few
# layers, whose text must be the CPU's. The KV cache's second tier has its own: tiers.sh.
#
#   benchmarks/gpu/run.sh [OUT]
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${1:-benchmarks/results/gpu-$(date +%F).jsonl}
budget=${BUDGET:-540}
python=${PYTHON:-python}
gpu=benchmarks/gpu
traces=${TMPDIR:-/tmp}/sapwood-traces
failed=0
: >"$out"
: >"$out.err"
part() { # SECONDS COMMAND...
  if ((SECONDS + $1 > budget)); then
    echo "# left out: ${*:2}"
    return
  fi
  echo "# $(date +%T) ${*:2}"
  if ! timeout -k 5 "$1" "${@:2}" 2>>"$out.err" | tee -a "$out" | sed 's/, "engine.*//'; then
    echo "# FAILED: ${*:2}; see $out.err"
    failed=1
  fi
}
check() { # The two do not measure, so they may share the machine.
  "$python" -m pytest -q -p no:cacheprovider -n 8 tests/kernels tests/worker/test_piecewise_graphs.py >"$out.tests" 2>&1 &
  local tests=$!
  part 150 "$python" $gpu/check_correctness.py ${CUT_DEMO:+--cut-demo "$CUT_DEMO"}
  wait "$tests" || failed=1
  tail -n 3 "$out.tests"
}
check
for model in qwen3-0.6b llama-3.1-8b; do
  part 120 "$python" $gpu/bench_engine.py --model $gpu/configs/$model --only decode,prefill,offline --profile "$traces"
done
part 150 "$python" $gpu/bench_serving.py --model $gpu/configs/qwen3-0.6b --rate 40
part 180 "$python" $gpu/bench_serving.py --model $gpu/configs/llama-3.1-8b --rate 20
float8="--batches 256 --repeats 1 --kv-cache-dtype fp8_e4m3"
# shellcheck disable=SC2086  # several words
part 40 "$python" $gpu/bench_engine.py --model $gpu/configs/qwen3-0.6b --only decode,offline $float8 --kv-gb 0
# shellcheck disable=SC2086
part 80 "$python" $gpu/bench_engine.py --model $gpu/configs/llama-3.1-8b --only decode,prefill,offline $float8 --quantization fp8
part 60 "$python" $gpu/bench_engine.py --model $gpu/configs/qwen3-0.6b --only sampled
for model in qwen3-0.6b llama-3.1-8b; do
  part 60 "$python" $gpu/bench_engine.py --model $gpu/configs/$model --only offline --no-overlap
done
part 70 "$python" $gpu/bench_serving.py --model $gpu/configs/llama-3.1-8b --only one,offline --kinds HTTP --singles 4 \
  --quantization fp8 --kv-cache-dtype fp8_e4m3
"$python" $gpu/table.py "$out"
exit "$failed"
