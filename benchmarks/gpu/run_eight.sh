#!/usr/bin/env bash
# DeepSeek-V3's shape over all GPUs of this machine (1, 2, 4 or 8): tensor parallel alone, with whole experts, and with data-parallel
# attention as well. Weights are made up on the device, in bfloat16, tokens are spread evenly over experts. Of its 61 layers there
# are as many as fit: 256 experts of a layer are 22.5 GB. Each part is a process with a time limit of its own; JSON lines go to
# OUT (default: benchmarks/results/gpu-eight-<date>.jsonl). Ranks are checked against each other in each step but those of
# data-parallel attention, where all have other requests.
#
#   benchmarks/gpu/run_eight.sh [OUT]
#
# To try it on a CPU with a tiny shape and two ranks: DEVICE=cpu GPUS=2 CONFIG=FOLDER benchmarks/gpu/run_eight.sh OUT
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${1:-benchmarks/results/gpu-eight-$(date +%F).jsonl}
python=${PYTHON:-python3}
device=${DEVICE:-cuda}
gpus=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}
limit=${LIMIT:-580}
shape=${CONFIG:-}
if [ -z "$shape" ]; then
  shape=$(mktemp -d)/deepseek-v3
  memory=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | head -n 1)
  # Of a rank's memory much is left for attention's weights, which it has whole in the last part, for the cache, and for what it
  # computes.
  layers=${LAYERS:-$((gpus * memory * 6 / 10 / 23500 + 2))}
  ((layers > 61)) && layers=61
  "$python" - "$shape" "$layers" <<'PYTHON'
import json, pathlib, sys

folder, layers = pathlib.Path(sys.argv[1]), int(sys.argv[2])
config = json.loads(pathlib.Path("benchmarks/gpu/configs/deepseek-v3-4-layers/config.json").read_text())
config |= {"num_hidden_layers": layers, "first_k_dense_replace": min(3, layers - 1)}
folder = folder.with_name(f"{folder.name}-{layers}-layers")
folder.mkdir(parents=True)
(folder / "config.json").write_text(json.dumps(config))
PYTHON
  shape=$shape-$layers-layers
fi
options=(--routing uniform --kv-gb 0 --only steady,prefill,offline --prefills 1x8192 --profile "${TMPDIR:-/tmp}/sapwood-traces")
[ "$device" = cpu ] && options=(--kv-gb 0.2 --only steady,prefill --prefills 1x64)
batches=1,64,256
[ "$device" = cpu ] && batches=1,4
: >"$out"
ways=("")
((gpus > 1)) && ways=("" "--expert-parallel" "--expert-parallel --data-parallel-attention")
for way in "${ways[@]}"; do
  echo "# $SECONDS s: $gpus GPUs $way"
  # shellcheck disable=SC2086
  timeout -k 5 "$limit" "$python" benchmarks/gpu/bench_engine.py --model "$shape" --device "$device" --tensor-parallel "$gpus" \
    $way "${options[@]}" --batches "$batches" 2>>"$out.err" | tee -a "$out" | sed 's/, "engine".*//' ||
    echo "# FAILED: see $out.err"
done
echo "# $SECONDS s"
