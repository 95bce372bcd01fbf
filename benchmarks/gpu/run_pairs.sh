#!/usr/bin/env bash
# All figures of prefill and decode on different workers, which want two GPUs of one host: what a KV transfer adds to the time to the
# first tokens, how evenly the decode worker generates beside long prompts, and --disaggregate auto beside always and never, for the
# 8B and the 0.6B shape; side by side where CUDA_VISIBLE_DEVICES, or the machine, has four GPUs. Weights are made up on the device.
# Each shape has a time limit of its own; JSON lines go to OUT (default: benchmarks/results/gpu-pairs-<date>.jsonl).
#
#   benchmarks/gpu/run_pairs.sh [OUT]
#
# To try it to its end on a CPU with a small shape: DEVICE=cpu CONFIG=FOLDER benchmarks/gpu/run_pairs.sh OUT
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${1:-benchmarks/results/gpu-pairs-$(date +%F).jsonl}
python=${PYTHON:-python3}
limit=${LIMIT:-580}
shapes=(benchmarks/gpu/configs/llama-3.1-8b benchmarks/gpu/configs/qwen3-0.6b)
flags=(--mix-seconds "${MIX_SECONDS:-45}" --mover "${MOVER:-auto}")
gpus=()
if [ "${DEVICE:-cuda}" = cpu ]; then
  shapes=("$CONFIG")
  flags+=(--device cpu --kv-gb 0.2 --host-gb 0.2 --clients 1 --lengths 1024 --repeats 2)
  flags+=(--streams 2 --outputs 40 --long 600 --rate 1 --seconds 3 --requests 6 --scale 0.05 --mix-seconds 1 --start-seconds 1)
else
  IFS=, read -ra gpus <<<"${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=uuid --format=csv,noheader | paste -sd,)}"
fi
: >"$out"
shape() { # FOLDER GPUS
  [ -z "$2" ] || export CUDA_VISIBLE_DEVICES=$2
  timeout -k 5 "$limit" "$python" benchmarks/gpu/bench_pairs.py --model "$1" "${flags[@]}" 2>>"$out.err" | tee -a "$out"
}
failed=0 running=()
for number in "${!shapes[@]}"; do
  if [ "${#gpus[@]}" -ge 4 ]; then
    shape "${shapes[number]}" "${gpus[2 * number]},${gpus[2 * number + 1]}" &
    running+=($!)
  else
    shape "${shapes[number]}" "${gpus[0]:+${gpus[0]},${gpus[1]}}" || failed=1
  fi
done
for each in "${running[@]}"; do wait "$each" || failed=1; done
[ "$failed" = 0 ] || echo "# FAILED: see $out.err"
echo "# $SECONDS s"
exit "$failed"
