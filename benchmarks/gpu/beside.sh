#!/usr/bin/env bash
# Engines beside each other on one GPU, each as its users start it, asked over HTTP by one client; JSON lines in OUT, then a table.
# Engines that are not installed are left out. MODELS: folders of benchmarks/gpu/configs; ENGINES: which; RATES: requests a second
# of the load; LIMIT: seconds that one engine may take with one model (default 300).
#
#   benchmarks/gpu/beside.sh [OUT] [FLAGS of bench_beside.py...]
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${1:-benchmarks/results/beside-$(date +%F).jsonl}
python=${PYTHON:-python}
: >"$out"
: >"$out.err"
for model in ${MODELS:-qwen3-0.6b llama-3.1-8b}; do
  for engine in ${ENGINES:-sapwood vllm sglang}; do
    module=${engine/sapwood/sapwood_worker}
    if ! "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$module') is None)"; then
      echo "# not installed: $engine"
      continue
    fi
    timeout -k 10 "${LIMIT:-300}" "$python" benchmarks/gpu/bench_beside.py --config "benchmarks/gpu/configs/$model" \
      --engine "$engine" --rates "${RATES:-20}" "${@:2}" 2>>"$out.err" | tee -a "$out" || echo "# FAILED: $engine, $model; see $out.err"
  done
done
"$python" benchmarks/gpu/bench_beside.py --table "$out"
