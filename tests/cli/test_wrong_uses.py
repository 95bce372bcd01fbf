"""Wrong command lines and cluster files: each is refused in one line with the word and what to do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import grpc
import pytest

from sapwood.cli.errors import UNREACHABLE, CliError
from sapwood.cli.main import _parse, build_parser, main
from sapwood.cli.request import failing_plainly
from sapwood.client import Client
from sapwood.errors import UnavailableError

FILES = {
    "bad.yaml": "model: [\n", "list.yaml": "- a\n", "unk.yaml": "modle: demo\n", "val.yaml": "workers: many\n",
    "nest.yaml": "worker:\n  max-runing: 3\n", "nestv.yaml": "worker:\n  max-running: 0\n",
    "svc.yaml": "wroker:\n  max-running: 3\n", "num.yaml": "port: 99999\n", "dup.yaml": "workers: 1\nworkers: 2\n",
    "typ.yaml": "worker: 5\n", "f.txt": "x", "bad.jsonl": "{\n", "empty.gguf": "", "m.gguf.gz": "x", "w.safetensors": "x",
    "adapter/adapter_config.json": "{}", "empty/config.json": "", "j.json": '{"workers": -2}', "cert.pem": "x", "e.jsonl": "",
    "env.yaml": "SAPWOOD_WORKER_MAX_RUNNING: 3\n", "unit.yaml": "worker:\n  host-cache: 4GB\n", "case.yaml": "Model: demo\n",
    "tab.yaml": "worker:\n\tmax-running: 3\n", "empty.yaml": "", "typo.yaml": "router:\n  http-prot: 8000\n",
    "dashes.yaml": "--model: demo\n", "listed.yaml": "workers: [1, 2]\n",
    "yes.yaml": "workers: true\n", "detach.yaml": "detach: true\n",
}  # fmt: skip

WRONG = (
    ("stpo", "there is no verb 'stpo'; did you mean stop?"),
    ("runn", "there is no verb 'runn'; did you mean run?"),
    ("--verison", "there is no flag --verison; did you mean --version?"),
    ("version", "there is no verb 'version'; `sapwood --version` prints it"),
    ("functions", "there is no verb 'functions'; `sapwood --help` lists them"),
    ("benchmark", "there is no verb 'benchmark'; `sapwood bench` measures one"),
    ("launch", "there is no verb 'launch'; `sapwood up` starts a server"),
    ("up --workers 0", "argument --workers: 0 is not at least 1"),
    ("up --workers x", "argument --workers: 'x' is not a whole number"),
    ("up --port 99999", "argument --port: 99999 is not 1 to 65535"),
    ("up --port x", "argument --port: 'x' is not a whole number"),
    ("up --http-port -1", "argument --http-port: -1 is not 1 to 65535"),
    ("up --prot 5", "unrecognized arguments: --prot; did you mean --port?"),
    ("up --model a b", "MODEL (b) and --model (a) are both given"),
    ("up a b", "unrecognized arguments: b"),
    (
        "up nope-model",
        "--model: 'nope-model' is neither 'demo' nor 'demo-base' nor an existing .gguf file or model "
        "directory, nor a name on the hub (owner/name, or owner/name:file.gguf), nor a URL",
    ),
    (
        "up ./nothere",
        "--model: './nothere' is neither 'demo' nor 'demo-base' nor an existing .gguf file or model "
        "directory, nor a name on the hub (owner/name, or owner/name:file.gguf), nor a URL",
    ),
    ("up f.txt", "--model: f.txt is neither a .gguf file nor a directory"),
    ("up --ports some", "argument --ports: 'some' is not one of fixed, auto"),
    ("up --log-level loud", "argument --log-level: 'loud' is not one of debug, info, warning, error"),
    ("up --threads 0", "argument --threads: 0 is not at least 1"),
    ("up --tensor-parallel 0", "argument --tensor-parallel: 0 is not at least 1"),
    (
        "up --policy nope",
        "--router-policy / SAPWOOD_ROUTER_POLICY: 'nope' is none of cache_aware, consistent_hash, "
        "least_load, least_tokens, power_of_two, prefix_hash, random, round_robin, session_affinity",
    ),
    (
        "up --router-policy nope",
        "--router-policy / SAPWOOD_ROUTER_POLICY: 'nope' is none of cache_aware, consistent_hash, "
        "least_load, least_tokens, power_of_two, prefix_hash, random, round_robin, session_affinity",
    ),
    ("up --roles decode,nope", "argument --roles: 'nope' is not one of both, prefill, decode"),
    ("up --roles decode --workers 3", "--workers 3 and --roles of 1 workers are both given"),
    ("up --drain-timeout x", "argument --drain-timeout: 'x' is not a number"),
    (
        "up --worker-max-running 0",
        "--worker-max-running / SAPWOOD_WORKER_MAX_RUNNING: Input should be greater than or equal to 1 (got '0')",
    ),
    (
        "up --worker-max-running x",
        "--worker-max-running / SAPWOOD_WORKER_MAX_RUNNING: Input should be a valid integer, unable to "
        "parse string as an integer (got 'x')",
    ),
    (
        "up --worker-dtype float7",
        "--worker-dtype / SAPWOOD_WORKER_DTYPE: Input should be 'auto', 'float32', 'bfloat16' or 'float16' (got 'float7')",
    ),
    (
        "up --worker-device gpu9",
        "--worker-device / SAPWOOD_WORKER_DEVICE: Input should be 'auto', 'cpu' or 'cuda' (got 'gpu9')",
    ),
    (
        "up --worker-quantization int3",
        "--worker-quantization / SAPWOOD_WORKER_QUANTIZATION: 'int3' is none of fp8, fp8_block, fp8_tensor, int4, int8, none",
    ),
    (
        "up --worker-context-length -5",
        "--worker-context-length / SAPWOOD_WORKER_CONTEXT_LENGTH: Input should be greater than or equal to 2 (got '-5')",
    ),
    (
        "up --worker-page-size 7x",
        "--worker-page-size / SAPWOOD_WORKER_PAGE_SIZE: Input should be a valid integer, unable to parse "
        "string as an integer (got '7x')",
    ),
    (
        "up --worker-kv-cache-dtype x",
        "--worker-kv-cache-dtype / SAPWOOD_WORKER_KV_CACHE_DTYPE: Input should be 'auto' or 'fp8_e4m3' (got 'x')",
    ),
    (
        "up --router-queue-size x",
        "--router-queue-size size / SAPWOOD_ROUTER_QUEUE_SIZE: Input should be a valid integer, unable "
        "to parse string as an integer (got 'x')",
    ),
    (
        "up --router-retry-attempts -1",
        "--router-retry-attempts attempts / SAPWOOD_ROUTER_RETRY_ATTEMPTS: Input should be greater than or equal to 1 (got '-1')",
    ),
    ("up --router-api-keys /nowhere", "--router-api-keys: cannot read /nowhere: No such file or directory"),
    (
        "up --router-tls-cert /nowhere",
        "--router-tls-cert / SAPWOOD_ROUTER_TLS_CERT: has no effect without --router-tls-key",
    ),
    (
        "up --router-cors-origins notaurl",
        "--router-cors-origins / SAPWOOD_ROUTER_CORS_ORIGINS: 'notaurl' is no origin as browsers send "
        "it: scheme://host or scheme://host:port",
    ),
    (
        "up nope/x/y",
        "--model: 'nope/x/y' is neither 'demo' nor 'demo-base' nor an existing .gguf file or model "
        "directory, nor a name on the hub (owner/name, or owner/name:file.gguf), nor a URL",
    ),
    ("up --tokenizer-config /nowhere", "--tokenizer-config: cannot read /nowhere: No such file or directory"),
    ("up --max-model-len 3", "unrecognized arguments: --max-model-len; did you mean --worker-context-length?"),
    (
        "up --gpu-memory-utilization 0.9",
        "unrecognized arguments: --gpu-memory-utilization; did you mean --worker-memory-fraction?",
    ),
    ("up --random-seed x", "argument --random-seed: 'x' is not a whole number"),
    ("up -c nothere.yaml", "--config: cannot read nothere.yaml: No such file or directory"),
    ("up -c bad.yaml", "--config: bad.yaml is not YAML:"),
    ("up -c list.yaml", "--config: list.yaml must hold settings (name: value)"),
    ("up -c unk.yaml", "--config: unk.yaml: there is no setting 'modle'; did you mean model?"),
    ("up -c val.yaml", "argument --workers: 'many' is not a whole number"),
    (
        "up -c nest.yaml",
        "--config: nest.yaml: there is no setting 'worker-max-runing'; did you mean worker-max-running?",
    ),
    (
        "up -c nestv.yaml",
        "--worker-max-running / SAPWOOD_WORKER_MAX_RUNNING: Input should be greater than or equal to 1 (got '0')",
    ),
    ("up -c svc.yaml", "--config: svc.yaml: there is no setting 'wroker'; did you mean workers?"),
    ("up -c num.yaml", "argument --port: 99999 is not 1 to 65535"),
    ("up -c dup.yaml", "--config: dup.yaml: workers is given twice; keep one"),
    ("up -c typ.yaml", "--config: typ.yaml: worker must hold settings (name: value)"),
    ("up -c", "argument -c/--config: expected one argument"),
    ("config -c unk.yaml", "--config: unk.yaml: there is no setting 'modle'; did you mean model?"),
    ("config --workers x", "argument --workers: 'x' is not a whole number"),
    (
        "chat --address http://127.0.0.1:8000",
        "--address: http://127.0.0.1:8000 is a URL; this takes the router's gRPC address, HOST:PORT",
    ),
    ("chat --address x", "--address: 'x' is not HOST:PORT, such as 127.0.0.1:50051"),
    ("chat --temperature x", "argument --temperature: 'x' is not a number"),
    ("chat --top-k x", "argument --top-k: 'x' is not a whole number"),
    ("chat --nope", "unrecognized arguments: --nope"),
    ("generate", "the following arguments are required: TEXT"),
    ("generate --max-tokens x hi", "argument --max-tokens: 'x' is not a whole number"),
    (
        "generate --address 127.0.0.1:1 hi",
        "no router answers at 127.0.0.1:1: connection refused; `sapwood up` starts one here",
    ),
    (
        "run nope-model hi",
        "sapwood: 'nope-model' is neither 'demo' nor 'demo-base' nor an existing .gguf file or model "
        "directory, nor a name on the hub (owner/name, or owner/name:file.gguf), nor a URL",
    ),
    (
        "run ./nothere hi",
        "sapwood: './nothere' is neither 'demo' nor 'demo-base' nor an existing .gguf file or model "
        "directory, nor a name on the hub (owner/name, or owner/name:file.gguf), nor a URL",
    ),
    ("pull", "the following arguments are required: NAME"),
    (
        "pull nope",
        "sapwood: 'nope' is neither 'demo' nor 'demo-base' nor an existing .gguf file or model "
        "directory, nor a name on the hub (owner/name, or owner/name:file.gguf), nor a URL",
    ),
    (
        "pull a/b/c",
        "sapwood: 'a/b/c' is neither 'demo' nor 'demo-base' nor an existing .gguf file or model "
        "directory, nor a name on the hub (owner/name, or owner/name:file.gguf), nor a URL",
    ),
    ("rm nope", "nope: no such model was fetched; `sapwood model list` lists those that were"),
    (
        "show nope",
        "'nope' is neither 'demo' nor 'demo-base' nor an existing .gguf file or model directory, nor a "
        "name on the hub (owner/name, or owner/name:file.gguf), nor a URL",
    ),
    ("show f.txt", "f.txt is neither a .gguf file nor a directory"),
    ("stop nope", "nope: no such cluster runs here; `sapwood ps` lists those that do"),
    ("logs nope", "nope: no such cluster runs here; `sapwood ps` lists those that do"),
    ("stop --al", "unrecognized arguments: --al; did you mean --all?"),
    ("ps x", "unrecognized arguments: x"),
    ("tokenize", "the following arguments are required: TEXT"),
    (
        "tokenize --model nope hi",
        "--model: 'nope' is neither 'demo' nor 'demo-base' nor an existing .gguf file or model "
        "directory, nor a name on the hub (owner/name, or owner/name:file.gguf), nor a URL",
    ),
    ("quantize x", "the following arguments are required: OUT"),
    (
        "quantize ./nothere out",
        "sapwood: './nothere' is neither 'demo' nor 'demo-base' nor an existing .gguf file or model "
        "directory, nor a name on the hub (owner/name, or owner/name:file.gguf), nor a URL",
    ),
    (
        "quantize ./nothere out --scheme int3",
        "argument --scheme: invalid choice: 'int3' (choose from 'int4', 'int8', 'float8', 'q8_0', 'q5_1', 'q5_0', 'q4_1', "
        "'q4_0', 'bf16', 'f16', 'f32')",
    ),
    (
        "quantize ./nothere out.gguf --scheme int8",
        "OUT: int8 writes a folder; a .gguf file is written with --scheme q8_0, q5_1, q5_0, q4_1, q4_0, bf16, f16, f32",
    ),
    ("quantize ./nothere out --scheme q8_0", "OUT: q8_0 writes a GGUF file: out.gguf"),
    (
        "quantize ./nothere out --scheme int8 --group-size 32",
        "--group-size: int8 has no groups of a size to choose; int4 has",
    ),
    ("batch", "the following arguments are required: ACTION"),
    ("batch run", "the following arguments are required: FILE"),
    ("batch run nothere.jsonl", "nothere.jsonl: No such file or directory"),
    ("bench --turns x", "argument --turns: 'x' is neither a number nor a range such as 64-256"),
    ("batch rnu", "argument ACTION: invalid choice: 'rnu' (choose from 'run', 'list', 'show', 'cancel', 'fetch')"),
    ("bench --requests 0", "argument --requests: 0 is not at least 1"),
    ("bench --output x.json", "unrecognized arguments: --output; did you mean --json?"),
    (
        "bench --num-prompts 3 --url http://127.0.0.1:1",
        "unrecognized arguments: --num-prompts; did you mean --requests?",
    ),
    ("bench --max-concurrency=3", "unrecognized arguments: --max-concurrency=3; did you mean --concurrency?"),
    ("bench --wat 3", "unrecognized arguments: --wat"),
    ("bench --url x", "--url: 'x' is no URL such as http://127.0.0.1:8000"),
    ("bench --url ftp://x", "--url: 'ftp://x' is no URL such as http://127.0.0.1:8000"),
    ("bench --concurrency 0 --url http://127.0.0.1:1", "argument --concurrency: 0 is not at least 1"),
    ("bench --concurrency x --url http://127.0.0.1:1", "argument --concurrency: 'x' is not a whole number"),
    ("bench --rate -1 --url http://127.0.0.1:1", "argument --rate: -1 is not over 0"),
    (
        "bench --dataset nope --url http://127.0.0.1:1",
        "argument --dataset: invalid choice: 'nope' (choose from 'random', 'shared-prefix', "
        "'multi-turn', 'json-schema', 'sharegpt', 'file')",
    ),
    ("bench --dataset file --url http://127.0.0.1:1", "--dataset file reads a file: name it with --data"),
    ("bench --dataset file --data nothere --url http://127.0.0.1:1", "cannot read nothere: No such file or directory"),
    (
        "bench --slo x=1 --url http://127.0.0.1:1",
        "argument --slo: 'x=1' is not ttft, itl, tpot, e2e = a time such as 200ms",
    ),
    (
        "bench --output-tokens 9-3 --url http://127.0.0.1:1",
        "argument --output-tokens: '9-3': a range goes up, from at least 1",
    ),
    ("bench --rate x", "argument --rate: 'x' is not a number"),
    (
        "bench offline --model nope --requests 2",
        "'nope' is neither 'demo' nor 'demo-base' nor an existing .gguf file or model directory, nor a "
        "name on the hub (owner/name, or owner/name:file.gguf), nor a URL",
    ),
    ("eval", "the following arguments are required: FILE"),
    ("eval nothere.jsonl --url http://127.0.0.1:1", "cannot read nothere.jsonl: No such file or directory"),
    (
        "eval bad.jsonl --url http://127.0.0.1:1",
        "bad.jsonl:1: not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
    ),
    ("top --interval 0", "argument --interval: 0 is not 0.1 to 3600"),
    ("top --address x", "no router answers at x: it is not HOST:PORT, or there is no such host"),
    (
        "top --address http://127.0.0.1:8000",
        "http://127.0.0.1:8000 is a URL; this takes the router's gRPC address, HOST:PORT",
    ),
    ("router", "the following arguments are required: WHAT"),
    ("router drian", "argument WHAT: invalid choice: 'drian' (choose from 'workers', 'route', 'top')"),
    ("router drain", "argument WHAT: invalid choice: 'drain' (choose from 'workers', 'route', 'top')"),
    (
        "router drain w:1 --address 127.0.0.1:1",
        "argument WHAT: invalid choice: 'drain' (choose from 'workers', 'route', 'top')",
    ),
    ("router route explain", "the following arguments are required: TEXT"),
    ("worker", "the following arguments are required: ACTION"),
    (
        "worker nope",
        "argument ACTION: invalid choice: 'nope' (choose from 'info', 'load', 'experts', 'pause', "
        "'resume', 'sleep', 'wake', 'drain', 'role', 'flush', 'pin', 'unpin', 'abort', 'profile')",
    ),
    ("cache", "the following arguments are required: ACTION"),
    ("cache nope", "argument ACTION: invalid choice: 'nope' (choose from 'stats', 'clear', 'attach', 'detach')"),
    ("lora", "the following arguments are required: ACTION"),
    ("lora load", "the following arguments are required: NAME, PATH"),
    ("weights", "the following arguments are required: ACTION"),
    ("weights nope", "argument ACTION: invalid choice: 'nope' (choose from 'show', 'update', 'rollback')"),
    ("kernels", "the following arguments are required: ACTION"),
    ("key", "the following arguments are required: NAME"),
    ("key alice --objective soon", "--objective: 'soon' is none of ttft-ms=, tpot-ms="),
    ("key alice --objective ttft-ms=1s", "--objective: 'ttft-ms=1s' has no milliseconds such as 500 or 200-2000"),
    ("batch list x", "unrecognized arguments: x"),
    ("store", "the following arguments are required: ACTION"),
    ("store forget", "the following arguments are required: STORE, TENANT"),
    ("docs nope", "there is no page 'nope'; `sapwood docs` lists them"),
    ("completion fish", "argument shell: invalid choice: 'fish' (choose from 'bash', 'zsh', 'tcsh')"),
    ("doctor x", "unrecognized arguments: x"),
    ("up Qwen/Qwen3-0.6B/", "nor a URL; did you mean Qwen/Qwen3-0.6B?"),
    ("up hf.co/Qwen/Qwen3-0.6B", "nor a URL; did you mean Qwen/Qwen3-0.6B?"),
    (
        "up https://huggingface.co/Qwen/Qwen3-0.6B",
        "--model: https://huggingface.co/Qwen/Qwen3-0.6B is a page of the hub, not a folder of files; name the model "
        "Qwen/Qwen3-0.6B",
    ),
    ("pull Demo", "nor a URL; did you mean demo?"),
    ("run demo:latest hi", "nor a URL; did you mean demo?"),
    ("up --model=", "--model: is empty; 'demo', a folder, a .gguf file, owner/name of the hub or a URL goes there"),
    ("up m.gguf.gz", "--model: m.gguf.gz is neither a .gguf file nor a directory; unpack it first"),
    ("show w.safetensors", "neither a .gguf file nor a directory; name the folder that holds it and config.json"),
    (
        "up adapter",
        "adapter holds no config.json: it is an adapter; start its base model, then `sapwood lora load NAME PATH`",
    ),
    ("show empty.gguf", "empty.gguf: is empty"),
    ("show empty", "empty/config.json: is empty"),
    ("run demo --max-tokens 0 hi", "argument --max-tokens: 0 is not at least 1"),
    ("run demo --port 8000", "; the model comes first, without a flag; `sapwood up` has the flags of the services"),
    (
        "chat --router http://127.0.0.1:8000",
        "unrecognized arguments: --router http://127.0.0.1:8000; did you mean --address?",
    ),
    ("chat --url 127.0.0.1:1", "unrecognized arguments: --url 127.0.0.1:1; did you mean --address?"),
    (
        "chat demo",
        "unrecognized arguments: demo; `sapwood run MODEL` starts a model and talks to it, `sapwood generate TEXT` asks one "
        "question",
    ),
    (
        "generate --prompt hi",
        "unrecognized arguments: --prompt; the text stands without a flag, in quotes if it is several words",
    ),
    (
        "tokenize hi there",
        "unrecognized arguments: there; the text stands without a flag, in quotes if it is several words",
    ),
    ("worker info 127.0.0.1:1", "unrecognized arguments: 127.0.0.1:1; --worker HOST:PORT says which one"),
    (
        "pull demo demo-base",
        "unrecognized arguments: demo-base; `sapwood model --help` says what each of its verbs takes",
    ),
    ("up -p 8000", "unrecognized arguments: -p; did you mean --port?"),
    ("up --worker-host-cache 4GB", "unable to parse string as a number (got '4GB'): leave 'GB' away"),
    ("up -c unit.yaml", "unable to parse string as a number (got '4GB'): leave 'GB' away"),
    ("up --worker-memory-fraction 90%", "(got '90%'): a share is a number from 0 to 1"),
    (
        "up --router-tls-cert cert.pem --router-tls-key none.pem",
        "--router-tls-key: cannot read none.pem: No such file or directory",
    ),
    (
        "up --router-tls-cert cert.pem --router-tls-key cert.pem",
        "one holds no PEM: -----BEGIN CERTIFICATE----- in the first, -----BEGIN ... PRIVATE KEY----- in the second",
    ),
    ("up --host localhost:8000", "is no address of this machine: an address stands there without scheme and port"),
    ("up --host http://0.0.0.0", "is no address of this machine: an address stands there without scheme and port"),
    ("up -c env.yaml", "there is no setting 'SAPWOOD-WORKER-MAX-RUNNING'; did you mean worker-max-running?"),
    ("up -c case.yaml", "there is no setting 'Model'; did you mean model?"),
    ("up -c dashes.yaml", "there is no setting '--model'; did you mean model?"),
    ("up -c typo.yaml", "there is no setting 'router-http-prot'; did you mean router-http-port?"),
    ("up -c tab.yaml", "--config: tab.yaml is not YAML:"),
    ("up -c empty.yaml", "--config: empty.yaml must hold settings (name: value)"),
    ("up -c listed.yaml", "argument --workers: '1,2' is not a whole number"),
    ("up -c j.json", "argument --workers: -2 is not at least 1"),
    ("up -c .", "--config: cannot read .: Is a directory"),
    ("up --port 50051 --http-port 50051", "--http-port and --port both mean port 50051"),
    ("up --worker-port 65535 --workers 2", "--worker-port: the ports of 2 workers exceed 65535"),
    ("up --router-api-keys f.txt", "f.txt, line 1: not a name, a SHA-256 and perhaps what the key may do"),
    ("up --worker-storage /tmp/x", "--worker-storage / SAPWOOD_WORKER_STORAGE: has no effect without a second tier"),
    (
        "generate hi --json-schema {}",
        "--json-schema: cannot read {}: No such file or directory; it takes the name of a file",
    ),
    ("generate hi --sampling top_p", "--sampling top_p: is not NAME=JSON, such as presence_penalty=0.5"),
    ("generate hi --sampling top-p=1", "--sampling top-p=1: there is no setting 'top-p'; did you mean top_p?"),
    ("generate hi --sampling zz=1", "--sampling zz=1: there is no setting 'zz'; there are allowed_token_ids, "),
    ("generate hi --sampling seed=high", "--sampling seed=high: 'high' is not JSON: "),
    ("generate hi --timeout soon", "argument --timeout: 'soon' is not a number"),
    (
        "bench --url http://127.0.0.1:1",
        "no server answers at http://127.0.0.1:1/v1: connection refused; `sapwood up` starts one here",
    ),
    ("bench http://127.0.0.1:1", "a server stands with its flag: --url http://127.0.0.1:1"),
    ("bench --slo ttft=200 --url http://127.0.0.1:1", "the limit is a time with its unit, such as 200ms or 1.5s"),
    ("bench compare e.jsonl e.jsonl", "e.jsonl is no result of `sapwood bench --json`"),
    ("eval e.jsonl --url http://127.0.0.1:1", "e.jsonl: nothing in it"),
    ("top --interval x", "argument --interval: 'x' is not a number"),
    ("scaler --per-worker 1 --min x", "argument --min: 'x' is not a whole number"),
    ("-v", "there is no flag -v; did you mean --version?"),
    ("Up demo", "there is no verb 'Up'; did you mean up?"),
    ("help nope", "there is no verb 'nope'; `sapwood --help` lists them"),
    ("stop 99999", "99999: no such cluster runs here; `sapwood ps` lists those that do"),
    ("models", "there is no verb 'models'; `sapwood list` shows the models that are here"),
    ("status", "`sapwood ps` lists the servers here"),
    ("start", "`sapwood up` starts a server"),
    ("remove demo", "`sapwood rm NAME` removes a model"),
    ("quantise a b", "there is no verb 'quantise'; did you mean quantize?"),
    ("quantize nope out", "sapwood: 'nope' is neither 'demo' nor 'demo-base' nor"),
    ("bench --address 127.0.0.1:1", "unrecognized arguments: --address; did you mean --grpc?"),
    ("generate --sampling stop=1 hi", "there is no setting 'stop'; --stop is a flag of its own"),
    ("generate --sampling xyz=1 hi", "there is no setting 'xyz'; there are allowed_token_ids,"),
    ("config -c yes.yaml", "argument --workers: 'true' is not a whole number"),
    ("up -c detach.yaml", "there is no setting 'detach'; --detach stands on the command line only"),
    ("docs models.html", "there is no page 'models.html'; did you mean models?"),
)
"""A command line, and what its last line says."""


@pytest.mark.parametrize(("words", "said"), WRONG, ids=[words for words, _ in WRONG])
def test_a_wrong_command_line_is_refused_with_what_to_do(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    here = {"SAPWOOD_HOME": str(tmp_path / "home"), "COLUMNS": "80", "SAPWOOD_UP_PORTS": "auto"}
    monkeypatch.setattr(os, "environ", {**os.environ, **here})
    try:
        code = main(words.split())
    except SystemExit as ended:
        code = ended.code
    assert code in (1, 2, 3)
    assert said in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("variable", "words", "said"),
    [
        ("SAPWOOD_UP_WORKERS=many", "up", "argument --workers: 'many' is not a whole number (SAPWOOD_UP_WORKERS)"),
        ("SAPWOOD_TEMPERATURE=hot", "chat", "argument --temperature: 'hot' is not a number (SAPWOOD_TEMPERATURE)"),
        ("SAPWOOD_TOP_INTERVAL=x", "top", "argument --interval: 'x' is not a number (SAPWOOD_TOP_INTERVAL)"),
        ("SAPWOOD_HOME=/etc/passwd", "pull demo", "cannot write the model under /etc/passwd/models"),
    ],
)
def test_a_wrong_variable_is_named(
    variable: str, words: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, _, value = variable.partition("=")
    monkeypatch.setenv(name, value)
    try:
        code = main(words.split())
    except SystemExit as ended:
        code = ended.code
    assert code in (1, 2)
    error = capsys.readouterr().err.splitlines()[-1]
    assert said in error
    assert name in error


def test_flags_may_stand_between_model_and_question() -> None:
    parsed = _parse(build_parser("run"), ["run", "demo", "--max-tokens", "20", "What", "is", "this?"])
    assert (parsed.name, parsed.max_tokens, parsed.question) == ("demo", 20, ["What", "is", "this?"])


def test_a_port_that_speaks_no_grpc_is_told_from_a_dead_one(
    taken_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"127.0.0.1:{taken_port}"
    assert main(["generate", "--timeout", "0.2", "--address", address, "hi"]) == UNREACHABLE
    assert capsys.readouterr().err == f"sapwood: the router at {address} has not answered in time, or is none\n"
    said = f"failed to connect to all addresses; last error: UNKNOWN: ipv4:{address}: timed out before receiving SETTINGS frame"
    with pytest.raises(CliError, match="does not speak gRPC"), failing_plainly(address):
        raise UnavailableError(grpc.StatusCode.UNAVAILABLE, said)


CALLS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"max_tokens": "x"}, "max_tokens: 'x' cannot be its value; it takes an integer"),
    ({"max_tokens": 1.5}, "max_tokens: 1.5 cannot be its value; it takes an integer"),
    ({"temperature": "x"}, "temperature: 'x' cannot be its value; it takes a number"),
    ({"top_p": "x"}, "top_p: 'x' cannot be its value; it takes a number"),
    ({"stop": 5}, "stop: 5 cannot be its value; it takes a list, each item a text"),
    ({"stop": [5]}, "stop: [5] cannot be its value; it takes a list, each item a text"),
    ({"seed": "x"}, "seed: 'x' cannot be its value; it takes an integer from 0"),
    ({"seed": -1}, "seed: -1 cannot be its value; it takes an integer from 0"),
    ({"n": "x"}, "n: 'x' cannot be its value; it takes an integer from 0"),
    ({"logit_bias": {"x": 1}}, "logit_bias: {'x': 1} cannot be its value; it takes a dictionary from an integer"),
    ({"logit_bias": 5}, "logit_bias: 5 cannot be its value; it takes a dictionary"),
    ({"nope": 1}, "there is no option 'nope'; help(sapwood.generation.Options) lists them"),
    ({"temprature": 1}, "there is no option 'temprature'; temperature?"),
    ({"tools": 5}, "tools: 5 cannot be its value; it takes a list"),
    ({"model": 5}, "model: 5 cannot be its value; it takes a text"),
    ({"tool_choice": "maybe"}, "tool_choice is one of"),
    ({"text": 5}, "text: 5 is no text; messages= takes a conversation"),
    ({"text": None}, "give exactly one of text, messages and token_ids"),
    ({"text": None, "messages": "hi"}, "messages: 'hi' cannot be its value; it takes a list"),
    ({"text": None, "token_ids": ["x"]}, "token_ids: ['x'] cannot be its value; it takes a list, each item an integer"),
    ({"text": None, "token_ids": [-1]}, "token_ids: [-1] cannot be its value; it takes a list, each item an integer"),
    (
        {"max_tokens": 2**40},
        "max_tokens: 1099511627776 cannot be its value; it takes an integer from -2^31 to 2^31 - 1",
    ),
    ({"regex": 5}, "regex: 5 cannot be its value; it takes a text"),
    ({"ebnf": ["a"]}, "ebnf: ['a'] cannot be its value; it takes a text"),
    ({"json_schema": {"enum": {1, 2}}}, "json_schema: Object of type set is not JSON serializable; it takes JSON"),
)
TURNS: tuple[tuple[Any, str], ...] = (
    (5, "messages[1]: messages are mappings with role and content; 5 is none"),
    ({"content": "hi"}, "messages[1].role is required"),
    ({"role": "user", "contnt": "hi"}, "messages[1].content is required"),
    ({"role": 5, "content": "hi"}, "messages[1].role: 5 cannot be its value; it takes a text"),
    ({"role": "user", "content": 5}, "messages[1].content: 5 cannot be its value; it takes a text or a list"),
    (
        {"role": "user", "content": ["hi"]},
        "messages[1].content[0]: 'hi' cannot be its value; it takes a dictionary with type",
    ),
    ({"role": "user", "content": [{"text": "hi"}]}, "messages[1].content[0].type is required"),
    ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text is required"),
    ({"role": "user", "content": [{"type": "txt"}]}, "messages[1].content[0].type: 'txt' is none of text, image_url"),
    (
        {"role": "user", "content": [{"type": "image", "image": 5}]},
        "messages[1].content[0].image: 5 cannot be its value",
    ),
    (
        {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
        "messages[1].content[0].image_url.url is required",
    ),
    ({"role": "assistant", "tool_calls": 5}, "messages[1].tool_calls: 5 cannot be its value; it takes a list"),
    (
        {"role": "assistant", "tool_calls": [{"id": "a", "function": {}}]},
        "messages[1].tool_calls[0].function.name is required",
    ),
    (
        {"role": "tool", "content": "4", "tool_call_id": 5},
        "messages[1].tool_call_id: 5 cannot be its value; it takes a text",
    ),
)


@pytest.mark.parametrize(("options", "said"), CALLS, ids=[str(options) for options, _ in CALLS])
def test_a_wrong_call_of_the_python_client_names_the_option(options: dict[str, Any], said: str) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises((TypeError, ValueError)) as raised:
        client.generate(**{"text": "hi", **options})
    assert str(raised.value).startswith(said)


@pytest.mark.parametrize(("turn", "said"), TURNS, ids=[str(turn) for turn, _ in TURNS])
def test_a_wrong_message_of_the_python_client_names_the_field(turn: Any, said: str) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises((TypeError, ValueError)) as raised:
        client.generate(messages=[{"role": "user", "content": "hi"}, turn])
    assert str(raised.value).startswith(said)


@pytest.mark.parametrize("address", [5, "http://127.0.0.1:8000", "localhost", "127.0.0.1:99999", "127.0.0.1:abc", ":1"])
def test_a_wrong_address_of_the_python_client_is_explained(address: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^address: .*HOST:PORT"):
        Client(address)


@pytest.mark.parametrize("address", ["[::1]:50051", "unix:///run/x", "dns:///router:50051", "router:50051"])
def test_other_names_of_servers_are_taken(address: str) -> None:
    Client(address).close()


def test_inputs_of_embeddings_and_labels_are_named() -> None:
    given: Any = 5
    with Client("127.0.0.1:1") as client:
        for call in (client.embed, client.classify):
            with pytest.raises(TypeError, match=r"^inputs: 5 cannot be its value; it takes a text"):
                call(given)


def test_the_tables_have_enough_wrong_uses() -> None:
    assert len(WRONG) + len(CALLS) >= 200
