#!/usr/bin/env bash
# All figures of prefill and decode on different workers, which want two GPUs of one host: what a hand-over adds to the time to the
# first tokens, how evenly the decode worker generates beside long prompts, and --disaggregate auto beside always and never, for the
# 8B and the 0.6B shape. Weights are made up on the device. Each part is a process with a time limit of its own; JSON lines go to OUT
# (default: benchmarks/results/gpu-pairs-<date>.jsonl).
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
movers=(auto cuda)
handoff=() decode=() mixes=()
if [ "${DEVICE:-cuda}" = cpu ]; then
  shapes=("$CONFIG")
  movers=(auto)
  small=(--device cpu --kv-gb 0.2 --host-gb 0.2)
  handoff=("${small[@]}" --lengths 1024 --repeats 2)
  decode=("${small[@]}" --streams 2 --outputs 40 --long 600 --rate 1 --seconds 3 --clients 1)
  mixes=("${small[@]}" --requests 6 --scale 0.05 --clients 1)
fi
: >"$out"
failed=0
part() { # COMMAND...
  echo "# $SECONDS s: $*"
  timeout -k 5 "$limit" "$@" 2>>"$out.err" | tee -a "$out" || { echo "# FAILED: see $out.err"; failed=1; }
}
for shape in "${shapes[@]}"; do
  for mover in "${movers[@]}"; do
    part "$python" benchmarks/gpu/bench_handoff.py --model "$shape" "${handoff[@]}" --worker-flags="--handoff-mover $mover"
  done
  part "$python" benchmarks/gpu/bench_pairs.py --model "$shape" --only decode "${decode[@]}"
  part "$python" benchmarks/gpu/bench_pairs.py --model "$shape" --only mixes "${mixes[@]}"
done
echo "# $SECONDS s"
exit $failed
