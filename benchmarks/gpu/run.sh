#!/usr/bin/env bash
# Checks and measures everything on one CUDA GPU: kernels against references and models against transformers, then for both
# benchmark models the engine alone and all services, in bfloat16 and in float8, as JSON lines in OUT (default:
# benchmarks/results/gpu-<date>.jsonl) and as a table. Each part is a process of its own with a time limit; one that fails does not
# take the others with it, but the exit code says so. What would not end within BUDGET seconds (default 570) is left out.
# CUT_DEMO: the demo model cut to a few layers, whose text must be the CPU's. BENCH_COMMIT: what to call the commit, where git
# does not know. The KV cache's second tier has its own: tiers.sh.
#
#   benchmarks/gpu/run.sh [OUT]
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${1:-benchmarks/results/gpu-$(date +%F).jsonl}
budget=${BUDGET:-570}
python=${PYTHON:-python}
gpu=benchmarks/gpu
small=(--model $gpu/configs/qwen3-0.6b)
large=(--model $gpu/configs/llama-3.1-8b)
profile=(--profile "${TMPDIR:-/tmp}/sapwood-traces")
cache=(--kv-cache-dtype fp8_e4m3)
float8=("${cache[@]}" --quantization fp8)
failed=0
: >"$out"
: >"$out.err"
part() { # SECONDS COMMAND...: what it takes at most, on an H200
  if ((SECONDS + $1 > budget)); then
    echo "# left out: ${*:2}"
    return
  fi
  echo "# $SECONDS s: ${*:2}"
  if ! timeout -k 5 "$1" "${@:2}" 2>>"$out.err" | tee -a "$out" | sed 's/, "engine.*//'; then
    echo "# FAILED: ${*:2}; see $out.err"
    failed=1
  fi
}
compile() { # FlashInfer builds its kernels when they are first used: processes side by side would wait for each other's compilers.
  timeout -k 5 "$1" "$python" - 2>>"$out.err" <<'END' || echo "# FlashInfer's kernels are built as they are needed"
import torch
from flashinfer.jit.attention.modules import gen_batch_prefill_module

from sapwood_kernels.compiled.early import build_each

bf16, heads = torch.bfloat16, (128, 128)
backends = ("fa3", "fa2") if torch.cuda.get_device_capability() == (9, 0) else ("fa2",)
build_each([
    gen_batch_prefill_module(backend, bf16, bf16, bf16, torch.int32, *heads, 0, window, False, False)
    for backend in backends for window in (False, True)
])
END
}
check() { # The two do not measure, so they may share the machine.
  "$python" -m pytest -q -p no:cacheprovider -n 8 tests/kernels tests/worker/model/attention tests/worker/model/test_gpu.py \
    tests/worker/model/runner/graphs/test_piecewise_graphs.py \
    tests/worker/model/quantization tests/worker/model/runner/graphs/test_decode_rows.py \
    tests/worker/model/sampling/test_token_sampler.py >"$out.tests" 2>&1 &
  local tests=$!
  part 150 "$python" $gpu/checks/check_correctness.py ${CUT_DEMO:+--cut-demo "$CUT_DEMO"}
  wait "$tests" || failed=1
  tail -n 3 "$out.tests"
}
engine() { part "$1" "$python" $gpu/bench_engine.py "${@:2}"; }
serving() { part "$1" "$python" $gpu/bench_serving.py "${@:2}" --singles 4 --prompts cached; }
compile 150
check
engine 70 "${small[@]}" --only decode,sampled,prefill,offline --both-loops "${profile[@]}"
engine 105 "${large[@]}" --only decode,prefill,offline --repeats 1 "${profile[@]}"
serving 100 "${large[@]}" --rate 20
serving 70 "${small[@]}" --rate 40
engine 70 "${large[@]}" "${float8[@]}" --only decode,prefill,offline --batches 1,256 --repeats 1
engine 40 "${small[@]}" "${cache[@]}" --only decode,offline --batches 1,64,256
engine 25 "${small[@]}" "${float8[@]}" --only prefill
serving 90 "${large[@]}" "${float8[@]}" --rate 20
serving 60 "${small[@]}" "${cache[@]}" --rate 40
"$python" $gpu/table.py "$out"
exit "$failed"
