"""A setting that would change nothing with the others is refused at the start, by its name. The table is of all there
are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sapwood_common.errors import ConfigError
from sapwood_common.settings.config import ServiceConfig, load_config, parse_config
from sapwood_router.config import RouterConfig
from sapwood_tokenizer.config import TokenizerConfig
from sapwood_worker.config import WorkerConfig
from sapwood_worker.model.runner.factory import OF_ENCODERS, ON_CPU, make_runner

ROUTER, TOKENIZER, WORKER = RouterConfig, TokenizerConfig, WorkerConfig
TIER = "--host-cache 1"
SPLIT = "--tensor-parallel 2 --data-parallel-attention"

REFUSED = [
    # What is given; what is refused of it; with what added it has an effect.
    (ROUTER, "--trace-endpoint ratio=0.1", "--trace-endpoint.ratio", "--trace-endpoint a:1,ratio=0.1"),
    (TOKENIZER, "--trace-endpoint ratio=0.1", "--trace-endpoint.ratio", "--trace-endpoint a:1,ratio=0.1"),
    (WORKER, "--trace-endpoint ratio=0.1", "--trace-endpoint.ratio", "--trace-endpoint a:1,ratio=0.1"),
    (TOKENIZER, "--revision v1", "--revision", "--model owner/name"),
    (WORKER, "--model x.gguf --revision v1", "--revision", "--model owner/name:x.gguf"),
    (WORKER, "--tls-cert c", "--tls-cert", "--tls-key k"),
    (WORKER, "--tls-key k", "--tls-key", "--tls-cert c"),
    (WORKER, "--tls-client-ca a", "--tls-client-ca", "--tls-cert c --tls-key k"),
    (WORKER, "--health-port host=0.0.0.0", "--health-port.host", "--health-port 0,host=0.0.0.0"),
    (ROUTER, "--admin-host 0.0.0.0", "--admin-host", "--admin-port 0"),
    (ROUTER, "--peer-cert c --peer-key k", "--peer-cert --peer-key", "--peer-ca a"),
    (ROUTER, "--peer-ca a --peer-cert c", "--peer-cert", "--peer-key k"),
    (ROUTER, "--peer-ca a --peer-key k", "--peer-key", "--peer-cert c"),
    (ROUTER, "--worker-name w", "--worker-name", "--peer-ca a"),
    (ROUTER, "--workers-dns interval=1", "--workers-dns.interval", "--workers-dns a:1,interval=1"),
    (ROUTER, "--policy random --cache-index-bytes 9", "--cache-index-bytes", "--shadow-policies cache_aware"),
    (ROUTER, "--policy random --no-kv-events", "--no-kv-events", "--model-policies m=cache_aware"),
    (ROUTER, "--policy random --kv-events bytes=9", "--kv-events --kv-events.bytes", "--model-policies m=cache_aware"),
    (ROUTER, "--kv-events off,bytes=9", "--kv-events.bytes", None),
    (ROUTER, "--shadow-policies cache_aware", "--shadow-policies", "--model-policies m=random"),
    (ROUTER, "--disaggregate never --decode-policy random", "--decode-policy", None),
    (ROUTER, "--queue-size 0,wait=9", "--queue-size.wait", None),
    (ROUTER, "--max-sessions 0,tokens=9", "--max-sessions.tokens", None),
    (ROUTER, "--max-sessions 0,ttl=9", "--max-sessions.ttl", None),
    (ROUTER, "--max-sessions leases=0,lease_ttl=9", "--max-sessions.lease-ttl", None),
    (ROUTER, "--retry-attempts 1,budget=0.5", "--retry-attempts.budget", None),
    (WORKER, "--deterministic --attention-backend torch", "--attention-backend", None),
    (WORKER, "--no-prefix-cache --host-cache 1", "--host-cache", None),
    (WORKER, "--no-prefix-cache --host-cache ratio=1", "--host-cache", None),
    (WORKER, f"--no-prefix-cache {TIER} --storage file:///x", "--host-cache --storage", None),
    (WORKER, "--prefix-cache off,eviction=lfu", "--prefix-cache.eviction", None),
    (WORKER, "--no-prefix-cache --policy lpm", "--policy", None),
    (WORKER, "--no-prefix-cache --policy dfs-weight", "--policy", None),
    (WORKER, "--no-prefix-cache --kv-events-port 0", "--kv-events-port", None),
    (WORKER, f"{TIER},ratio=1", "--host-cache.ratio", None),
    (WORKER, "--host-cache write=write_back", "--host-cache.write", f"{TIER},write=write_back"),
    (WORKER, "--no-prefix-cache --role prefill", "--role", None),
    (WORKER, "--tls-cert c --tls-key k --role decode", "--role", None),
    (WORKER, "--kv-transfer-port 1", "--kv-transfer-port", "--role prefill"),
    (WORKER, "--kv-transfer-port 1", "--kv-transfer-port", "--role decode"),  # roles change
    (WORKER, "--kv-transfer-port 1", "--kv-transfer-port", TIER),
    (WORKER, "--kv-transfer share=0.9", "--kv-transfer", "--role decode"),
    (WORKER, "--kv-transfer shm", "--kv-transfer", "--host-cache ratio=1"),
    (WORKER, "--role prefill --host-cache write=write_back", "--host-cache.write", None),
    (WORKER, "--storage file:///x", "--storage", "--host-cache ratio=2"),
    (WORKER, "--storage-prefetch best_effort", "--storage-prefetch", TIER),
    (WORKER, "--storage-prefetch share=0.9", "--storage-prefetch", TIER),
    (
        WORKER,
        f"{TIER} --storage-prefetch best_effort,seconds=9,per_1k=9",
        "--storage-prefetch.seconds --storage-prefetch.per-1k",
        None,
    ),
    (WORKER, "--kv-events-replay-port 0", "--kv-events-replay-port", "--kv-events-port 0"),
    (WORKER, "--kv-events topic=t", "--kv-events", "--kv-events-port 0"),
    (WORKER, "--kv-events 0.0.0.0,key_folder=folder", "--kv-events", "--kv-events-port 0"),
    (WORKER, "--kv-events-port 0 --kv-events keep=9", "--kv-events.keep", "--kv-events-replay-port 0"),
    (WORKER, "--num-pages 99 --kv-cache-gb 1", "--kv-cache-gb", None),
    (WORKER, "--num-pages 99 --memory-fraction 0.5", "--memory-fraction", None),
    (WORKER, "--kv-cache-gb 1 --memory-fraction 0.5", "--memory-fraction", None),
    (WORKER, "--dtype float32 --no-cuda-graphs", "--no-cuda-graphs", None),
    (WORKER, "--cuda-graphs off,max_batch=8", "--cuda-graphs.max-batch", None),
    (WORKER, "--attention-backend decode=torch --cuda-graphs max_batch=8", "--cuda-graphs.max-batch", None),
    (WORKER, "--max-running 8 --cuda-graphs max_batch=8", "--cuda-graphs.max-batch", "--max-running 9"),
    (WORKER, "--load-format dummy --stored-weights widen", "--stored-weights", None),
    (WORKER, "--expert-parallel", "--expert-parallel", "--tensor-parallel 2"),
    (
        WORKER,
        "--expert-parallel redundant=2",
        "--expert-parallel --expert-parallel.redundant",
        "--tensor-parallel 2 --expert-parallel on,redundant=2",
    ),
    (WORKER, "--all-reduce backend", "--all-reduce", "--tensor-parallel 2"),
    (
        WORKER,
        "--pipeline-parallel micro_batches=off",
        "--pipeline-parallel.micro-batches",
        "--pipeline-parallel 2,micro_batches=off",
    ),
    (
        WORKER,
        "--tensor-parallel 2 --expert-parallel on,redundant=2 --pipeline-parallel 2",
        "--expert-parallel.redundant",
        None,
    ),
    (WORKER, "--lora x=/a", "--lora", "--lora-slots 2"),
    (WORKER, "--lora-slots 0,rank=8", "--lora-slots.rank", "--lora-slots 2,rank=8"),
    (WORKER, "--lora-slots 0,host_gb=1", "--lora-slots.host-gb", "--lora-slots 2,host_gb=1"),
    (WORKER, "--lora-slots 0,resolver=folder:/a", "--lora-slots.resolver", "--lora-slots 2,resolver=folder:/a"),
    (WORKER, f"{SPLIT} --lora-slots 2", "--lora-slots", None),
    (WORKER, "--data-parallel-attention", "--data-parallel-attention", "--tensor-parallel 2"),
    (WORKER, f"{SPLIT} --pipeline-parallel 2", "--data-parallel-attention", None),
    (
        WORKER,
        f"{SPLIT} --expert-parallel off,dispatch=direct",
        "--expert-parallel.dispatch",
        "--expert-parallel on,dispatch=direct",
    ),
    (WORKER, "--tensor-parallel 2 --expert-parallel on,dispatch=direct", "--expert-parallel.dispatch", None),
    (WORKER, f"{SPLIT} --all-reduce two-shot", "--all-reduce", f"{SPLIT} --all-reduce one-shot"),
    (WORKER, f"{SPLIT} --speculate draft:demo", "--speculate", f"{SPLIT} --speculate prefix"),
    (WORKER, "--node-rank 1", "--node-rank", "--nnodes 2"),
    (WORKER, "--rendezvous a:1", "--rendezvous", "--nnodes 2"),
    (WORKER, "--rendezvous-key file", "--rendezvous-key", "--nnodes 2"),
    (WORKER, "--sglang off,tokenizer=folder", "--sglang.tokenizer", "--sglang on,tokenizer=folder"),
    (WORKER, "--structured-output off,jump_forward=off", "--structured-output.jump-forward", None),
    (WORKER, "--structured-output off,timeout=1", "--structured-output.timeout", None),
    (WORKER, "--structured-output off,backend=xgrammar", "--structured-output.backend", None),
]
OF_BERT = [
    *("--quantization fp8", "--kv-cache-dtype fp8_e4m3", "--kv-cache-gb 1", "--num-pages 99", "--page-size 8"),
    *(
        "--memory-fraction 0.5",
        "--no-overlap",
        "--kernels wait=on",
        "--no-prefix-cache",
        "--kv-events-port 0",
    ),
    *("--kv-events-port 0 --kv-events-replay-port 0 --kv-events topic=t,keep=9,format=array",),
    *(TIER, "--host-cache ratio=1,write=write_back --storage file:///x --storage-prefetch best_effort"),
    *("--conservativeness 0.5", "--structured-output jump_forward=off,timeout=1", "--policy lof"),
    *("--structured-output backend=xgrammar", "--sampling-defaults none"),
    *(
        "--no-cuda-graphs",
        "--cuda-graphs max_batch=8",
        "--kernels tuning=0",
        "--attention-backend torch",
        "--speculate prefix",
        "--deterministic",
    ),
    *(
        "--tensor-parallel 2 --expert-parallel on,redundant=2 --all-reduce backend",
        "--tensor-parallel 2 --data-parallel-attention",
        "--tensor-parallel 2 --data-parallel-attention --expert-parallel on,dispatch=direct",
        "--lora-slots 2",
        "--no-pictures",
        "--pipeline-parallel 2",
        "--stored-weights widen",
        "--role prefill",
    ),
]


def named(said: str) -> str:
    """The flag that a refusal names; of a part of a setting with the part: ``--queue-size.wait``."""
    return said.partition(" / ")[0].replace(" ", ".").replace("_", "-")


def parse(cls: type[ServiceConfig], flags: str, capsys: pytest.CaptureFixture[str]) -> ServiceConfig | str:
    """The configuration, or what is said before the exit."""
    try:
        return parse_config(cls, "service", "", flags.split())
    except SystemExit as ended:
        assert ended.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line


@pytest.mark.parametrize(("cls", "flags", "refused", "added"), REFUSED)
def test_what_changes_nothing_is_refused_by_name(
    cls: type[ServiceConfig], flags: str, refused: str, added: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    said = parse(cls, flags, capsys)
    assert isinstance(said, str), said
    assert [named(part) for part in said.removeprefix("service: error: ").split("; ")] == refused.split()
    assert all("has no effect w" in part for part in said.split("; ") if "unless" not in part)
    if added is not None:
        config = parse(cls, f"{flags} {added}", capsys)
        assert isinstance(config, cls), config


def write_bert(folder: Path, architecture: str) -> Path:
    sizes = {
        "vocab_size": 9,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    (folder / "config.json").write_text(
        json.dumps({"architectures": [architecture], "max_position_embeddings": 64, **sizes})
    )
    return folder


@pytest.mark.parametrize("flags", OF_BERT)
def test_what_changes_nothing_for_an_encoder_is_refused_when_the_model_is_known(tmp_path: Path, flags: str) -> None:
    model = write_bert(tmp_path, "BertModel")
    plain = ["--model", str(model), "--device", "cpu", "--load-format", "dummy"]
    assert not make_runner(parse_config(WorkerConfig, "worker", "", plain)).info.generates
    config = parse_config(WorkerConfig, "worker", "", [*plain[:4], *flags.split()])  # it is refused before it is loaded
    with pytest.raises(ConfigError) as caught:
        make_runner(config)
    told = {part.split()[0] for part in str(caught.value).split("; ")}
    assert told == {flag for flag in flags.split() if flag.startswith("--")}
    assert "has no effect with a model that makes embeddings only" in str(caught.value)


@pytest.mark.parametrize(
    "flag",
    [
        "--memory-fraction 0.5",
        "--no-overlap",
        "--no-cuda-graphs",
        "--cuda-graphs max_batch=8",
        "--kernels tuning=9",
        "--kernels wait=on",
    ],
)
def test_what_is_for_gpus_is_refused_on_a_cpu(tmp_path: Path, flag: str) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    flags = ["--model", str(tmp_path), "--device", "cpu", *flag.split()]
    with pytest.raises(ConfigError, match=f"^{flag.split(maxsplit=1)[0]} .*has no effect on a CPU$"):
        make_runner(parse_config(WorkerConfig, "worker", "", flags))


def test_the_tables_are_whole_and_name_what_there_is() -> None:
    for cls in (ROUTER, TOKENIZER, WORKER):
        settings = {name for needs in cls.needs for name in needs.settings}
        assert {name.partition(".")[0] for name in settings} <= cls.model_fields.keys()
        flags = [flag for _, _, refused, _ in REFUSED for flag in refused.split()]
        told = {flag.removeprefix("--").removeprefix("no-").replace("-", "_") for flag in flags}
        assert settings <= told, f"no row for {settings - told}"
    settings = {name for needs in (*ON_CPU, *OF_ENCODERS) for name in needs.settings}
    settings = {name.partition(".")[0] for name in settings}
    assert settings <= WORKER.model_fields.keys()
    told = {flag.removeprefix("--").removeprefix("no-") for flags in OF_BERT for flag in flags.split() if "--" in flag}
    assert {name.replace("_", "-") for name in settings} == told


@pytest.mark.parametrize("cls", [ROUTER, TOKENIZER, WORKER])
def test_a_default_that_is_spelled_out_is_no_setting(cls: type[ServiceConfig]) -> None:
    defaults: dict[str, Any] = dict(cls())
    assert dict(load_config(cls, defaults)) == defaults
