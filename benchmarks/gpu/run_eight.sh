#!/usr/bin/env bash
# DeepSeek-V3's shape over all GPUs of this machine (1, 2, 4 or 8): tensor parallel alone (tp), with whole experts (ep), and with
# data-parallel attention as well (dp), and rows that go to the ranks of their experts only (direct). Weights are made up on the device in float8 with a scale for each 128 x 128, as many of
# the 61 layers as fit; tokens are spread evenly over experts. First, tiny models over the same ranks answer as one GPU does
# (not with one GPU). Each part is a process with a time limit of its own; JSON lines go to OUT (default:
# benchmarks/results/gpu-eight-<date>.jsonl), the least times that such GPUs could take first. In each step of tp and ep all
# ranks have sampled the same, in dp, where each has other requests, all have got the same rows for each layer, or the part fails.
#
#   benchmarks/gpu/run_eight.sh [OUT]
#
# GPUS, LAYERS, WAYS="tp ep dp direct" and LIMIT (seconds of a part) say what else is to be. DEVICE=cpu GPUS=2 tries it with a tiny shape;
# DIVERGING=1 as well has rank 1 get other numbers than the others: every timed part must fail and name it.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${1:-benchmarks/results/gpu-eight-$(date +%F).jsonl}
python=${PYTHON:-python3}
device=${DEVICE:-cuda}
gpus=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}
limit=${LIMIT:-580}
gpu=benchmarks/gpu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
shape=$folder/deepseek-v3-float8
memory=0
options=(--kv-gb 0.2 --only "steady,prefill" --batches "1,4" --prefills 1x64)
if [ "$device" != cpu ]; then
  memory=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | head -n 1)
  options=(--routing uniform --kv-gb 0 --only "steady,prefill,offline" --batches "1,64,256" --prefills 1x8192
    --expert-tuning "${TUNING:-30}" --profile "${TMPDIR:-/tmp}/sapwood-traces")
fi
: >"$out"
part() { # COMMAND...
  echo "# $SECONDS s: ${*:2}" | tee -a "$out"
  timeout -k 5 "$limit" "$@" 2>>"$out.err" | tee -a "$out" | sed 's/, "engine".*//' || echo "# FAILED: see $out.err"
}
"$python" $gpu/eight_shape.py make "$shape" --gpus "$gpus" --memory "$memory" --layers "${LAYERS:-0}" || exit 1
part "$python" $gpu/eight_shape.py floors "$shape" --gpus "$gpus"
declare -A flags=([tp]="" [ep]="--expert-parallel" [dp]="--expert-parallel --data-parallel-attention")
flags[direct]="${flags[dp]} --expert-dispatch direct"
ways=${WAYS:-tp ep dp direct}
((gpus > 1)) || ways=tp
checked=$(grep -oEw "tp|ep|dp" <<<"$ways" | paste -sd,)
((gpus > 1)) && part "$python" $gpu/check_tensor_parallel.py --device "$device" --sizes "$gpus" --ways "${checked:-dp}"
for way in $ways; do
  # shellcheck disable=SC2086
  part "$python" $gpu/bench_engine.py --model "$shape" --device "$device" --tensor-parallel "$gpus" ${flags[$way]} "${options[@]}" \
    --diverging-rank "${DIVERGING:--1}"
done
echo "# $SECONDS s"
