#!/usr/bin/env bash
# Checks and measures mixtures of experts and latent attention on one CUDA GPU: kernels and tiny models against a CPU, then the
# engine alone on true shapes with random weights and tokens spread evenly over experts. Each part is a process of its own with a
# time limit; what would not end within BUDGET seconds (default 570) is left out. JSON lines go to OUT (default:
# benchmarks/results/gpu-sparse-<date>.jsonl). FlashInfer is taken where its kernels have been built, else our own.
#
#   benchmarks/gpu/sparse.sh [OUT]
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${1:-benchmarks/results/gpu-sparse-$(date +%F).jsonl}
python=${PYTHON:-python3}
budget=${BUDGET:-570}
gpu=benchmarks/gpu
backend=triton
[ -n "$(find ~/.cache/flashinfer -name '*.so' 2>/dev/null | head -n 1)" ] && backend=auto
: >"$out"
part() { # SECONDS COMMAND...
  if ((SECONDS + $1 > budget)); then
    echo "# left out: ${*:2}"
    return
  fi
  echo "# $SECONDS s: ${*:2}"
  timeout -k 5 "$1" "${@:2}" 2>>"$out.err" | tee -a "$out" | sed 's/, "engine".*//' || echo "# FAILED: see $out.err"
}
engine() { # SECONDS MODEL KV_GB OPTIONS...
  local own=$backend
  [[ $2 == deepseek* ]] && own=auto
  part "$1" "$python" $gpu/bench_engine.py --model "$gpu/configs/$2" --routing uniform --kv-gb "$3" \
    --attention-backend "$own" "${@:4}"
}
part 120 "$python" -m pytest -q -p no:cacheprovider -n 8 tests/kernels/experts tests/kernels/attention/test_triton_latent.py \
  tests/worker/model/families/test_sparse_kernels.py tests/worker/test_experts.py
short=(--only "steady,prefill" --batches 1,8,64,256 --prefills 1x8192,8x8192 --profile "${TMPDIR:-/tmp}/sapwood-traces")
engine 60 qwen3-30b-a3b 40 "${short[@]}"
engine 55 deepseek-v2-lite 20 "${short[@]}"
engine 60 deepseek-v3-4-layers 10 --only steady,prefill --batches 1,64,256 --prefills 1x8192
# Tiles as a worker measures them at its first start; the second start reads them.
tuned=(--expert-tuning 40 --only steady,prefill --batches 1,8,64,256 --prefills 1x8192)
engine 80 qwen3-30b-a3b 40 "${tuned[@]}"
engine 70 qwen3-30b-a3b 60 --expert-tuning 40 --only offline
engine 80 deepseek-v2-lite 20 "${tuned[@]}"
engine 45 deepseek-v2-lite 60 --expert-tuning 40 --only offline
echo "# $SECONDS s"
