#!/usr/bin/env bash
# Where a start's seconds go: the 8B with empty caches, then with those, then with empty ones and an archive of them; JSON lines in
# OUT. About 190 s on an H200 with 16 cores; each start has its own limit.
#
#   benchmarks/gpu/start.sh [OUT]
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${1:-benchmarks/results/start-$(date +%F).jsonl}
places=$(mktemp -d)
trap 'rm -rf "$places"' EXIT
: >"$out"
: >"$out.err"
start() { # CACHES SECONDS FLAGS...
  mkdir -p "$places/$1"
  TRITON_CACHE_DIR=$places/$1/triton FLASHINFER_WORKSPACE_BASE=$places/$1 CUDA_CACHE_PATH=$places/$1/cuda \
    timeout -k 5 "$2" "${PYTHON:-python}" benchmarks/gpu/bench_start.py --model benchmarks/gpu/configs/llama-3.1-8b "${@:3}" \
    2>>"$out.err" | tee -a "$out"
}
start first 190 --name cold --pack "$places/kernels.tgz"
start first 40 --name warm
start second 60 --name archive --archive "$places/kernels.tgz"
