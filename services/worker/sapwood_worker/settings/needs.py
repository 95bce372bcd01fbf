"""What a worker's settings need to have an effect."""

from __future__ import annotations

from sapwood_common.settings.needs import Needs
from sapwood_worker.settings.names import attention_of

NEEDS = (
    Needs(
        ("host_cache", "storage", "storage_prefetch", "prefix_cache.eviction"),
        lambda config: config.prefix_cache.on,
        "without {prefix_cache}",
    ),
    Needs(
        ("host_cache.write", "storage", "storage_prefetch"),
        lambda config: config.host_cache.gb or config.tier_ratio,
        "without a second tier: {host_cache}",
    ),
    Needs(("host_cache.ratio",), lambda config: not config.host_cache.gb, "with {host_cache} in GiB"),
    Needs(("role",), lambda config: config.prefix_cache.on, "without {prefix_cache}: pages are passed on from there"),
    Needs(
        ("role",),
        lambda config: config.tls_cert is None or config.tls_client_ca is not None,
        "with {tls_cert} and without {tls_client_ca}, by which workers check each other's certificates",
    ),
    Needs(
        ("kv_transfer_port", "kv_transfer"),
        lambda config: config.host_cache.gb or config.tier_ratio,
        "without {role}, or a second tier with which it can change: {host_cache}",
    ),
    Needs(
        ("host_cache.write",),
        lambda config: config.role != "prefill",
        "with {role} prefill, whose pages go to the host at once",
    ),
    Needs(
        ("storage_prefetch.seconds", "storage_prefetch.per_1k"),
        lambda config: config.storage_prefetch.mode == "timeout",
        "unless {storage_prefetch} is timeout",
    ),
    Needs(
        ("policy",),
        lambda config: config.prefix_cache.on or config.policy.name not in ("lpm", "dfs-weight"),
        "without {prefix_cache}: it goes by what is cached",
    ),
    Needs(("expert_parallel",), lambda config: config.tensor_parallel > 1, "with a {tensor_parallel} of 1"),
    Needs(
        ("pipeline_parallel.micro_batches",),
        lambda config: config.pipeline_parallel.stages > 1,
        "with a {pipeline_parallel} of 1",
    ),
    Needs(("all_reduce",), lambda config: config.tensor_parallel > 1, "with a {tensor_parallel} of 1"),
    Needs(("data_parallel_attention",), lambda config: config.tensor_parallel > 1, "with a {tensor_parallel} of 1"),
    Needs(
        ("data_parallel_attention",), lambda config: config.pipeline_parallel.stages == 1, "with {pipeline_parallel}"
    ),
    Needs(
        ("all_reduce",),
        lambda config: not config.data_parallel_attention or config.all_reduce != "two-shot",
        "with {data_parallel_attention}, where a rank gets the sums of its own rows only, if it is two-shot",
    ),
    Needs(
        ("speculate",),
        lambda config: not config.data_parallel_attention or config.speculate in ("auto", "prefix", "off"),
        "with {data_parallel_attention}, unless it is auto, prefix or off",
    ),
    Needs(("expert_parallel.redundant",), lambda config: config.expert_parallel.on, "without {expert_parallel} on"),
    Needs(
        ("expert_parallel.dispatch",),
        lambda config: config.expert_parallel.on and config.data_parallel_attention,
        "without {expert_parallel} and {data_parallel_attention}: all ranks have all rows",
    ),
    Needs(
        ("expert_parallel.dispatch",),
        lambda config: config.nnodes == 1,
        "with {nnodes}: ranks write to each other's memory",
    ),
    Needs(
        ("expert_parallel.redundant",),
        lambda config: config.pipeline_parallel.stages == 1,
        "with {pipeline_parallel}: experts move on ranks that have all layers",
    ),
    Needs(("node_rank", "rendezvous", "rendezvous_key"), lambda config: config.nnodes > 1, "without {nnodes}"),
    Needs(("sglang.tokenizer",), lambda config: config.sglang.on, "without {sglang} on"),
    Needs(("kv_events_port",), lambda config: config.prefix_cache.on, "without {prefix_cache}"),
    Needs(
        ("kv_events_replay_port", "kv_events"),
        lambda config: config.kv_events_port is not None,
        "without {kv_events_port}",
    ),
    Needs(
        ("kv_events.keep",),
        lambda config: config.kv_events_replay_port is not None,
        "without {kv_events_replay_port}",
    ),
    Needs(("kv_cache_gb", "memory_fraction"), lambda config: config.num_pages is None, "with {num_pages}"),
    Needs(("memory_fraction",), lambda config: config.kv_cache_gb is None, "with {kv_cache_gb}"),
    Needs(
        ("cuda_graphs",),
        lambda config: config.dtype != "float32",
        "with {dtype} float32, which is never captured",
    ),
    Needs(("cuda_graphs.max_batch",), lambda config: config.cuda_graphs.on, "without {cuda_graphs}"),
    Needs(("stored_weights",), lambda config: config.load_format == "auto", "with {load_format} dummy"),
    Needs(
        ("cuda_graphs.max_batch",),
        lambda config: attention_of(config.attention_backend)["decode"] != "torch",
        "with {attention_backend} torch, whose decodes are never captured",
    ),
    Needs(
        ("cuda_graphs.max_batch",),
        lambda config: config.max_running is None or config.cuda_graphs.max_batch < config.max_running,
        "with a {max_running} that is no larger",
    ),
    Needs(
        ("structured_output.jump_forward", "structured_output.timeout", "structured_output.backend"),
        lambda config: config.structured_output.on,
        "without {structured_output}",
    ),
)
