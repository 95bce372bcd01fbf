"""Converts between protobuf and the worker's own types; requests are validated here."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from sapwood.v1 import common_pb2, worker_pb2
from sapwood_common.contract.limits import (
    LONGEST_SALT,
    LONGEST_TENANT,
    MOST_CONTINUATIONS,
    MOST_EMBEDDED,
    MOST_SCORED,
    MOST_SCORED_TOKENS,
)
from sapwood_common.contract.page_hash import cache_namespace
from sapwood_common.contract.sampling import SamplingParams, check_tokens
from sapwood_common.contract.sampling_message import from_message
from sapwood_common.contract.seeds import Seeds
from sapwood_common.errors import InvalidArgumentError, NotFoundError
from sapwood_common.telemetry.logs import is_valid_request_id
from sapwood_common.telemetry.shown_text import without_credentials
from sapwood_worker.front.kv_event_stream import KvEventBatch, KvEventStream
from sapwood_worker.front.loras import KnownLora, LoadedLora, Loras
from sapwood_worker.ipc.messages import AnnouncePages, Terms
from sapwood_worker.records.continuations import Continuation
from sapwood_worker.records.handoff import Handoff, HandoffTicket
from sapwood_worker.records.kv_events import BlockRemoved, BlockStored, KvEvent, Medium, split_hashes
from sapwood_worker.records.load import Load, LoraUse, TierName, TierReport
from sapwood_worker.records.model_info import ModelInfo
from sapwood_worker.records.output import Pooling, RequestOutput, TokenLogprobs
from sapwood_worker.settings import Role

_FINISH = {
    "stop": common_pb2.FINISH_REASON_STOP,
    "length": common_pb2.FINISH_REASON_LENGTH,
    "abort": common_pb2.FINISH_REASON_ABORT,
}


_POOLING: dict[worker_pb2.Pooling, Pooling] = {
    worker_pb2.POOLING_MEAN: "mean",
    worker_pb2.POOLING_LAST: "last",
    worker_pb2.POOLING_CLS: "cls",
    worker_pb2.POOLING_LABELS: "labels",
}
_ACTIVATION = {
    "softmax": worker_pb2.ACTIVATION_SOFTMAX,
    "sigmoid": worker_pb2.ACTIVATION_SIGMOID,
    "none": worker_pb2.ACTIVATION_UNSPECIFIED,
}

_ROLE: dict[Role, worker_pb2.WorkerRole] = {
    "both": worker_pb2.WORKER_ROLE_BOTH,
    "prefill": worker_pb2.WORKER_ROLE_PREFILL,
    "decode": worker_pb2.WORKER_ROLE_DECODE,
}
_TRANSFER_ID_BYTES = 16

_MEDIUM: dict[Medium, worker_pb2.KvMedium] = {
    "GPU": worker_pb2.KV_MEDIUM_GPU,
    "CPU_TIER1": worker_pb2.KV_MEDIUM_CPU_TIER1,
    "CPU_TIER2": worker_pb2.KV_MEDIUM_CPU_TIER2,
}


def check_prompt(request: worker_pb2.WorkerGenerateRequest, info: ModelInfo) -> None:
    """Raises InvalidArgumentError naming ``request_id`` or ``token_ids`` if the prompt cannot be run."""
    if not info.generates:
        raise InvalidArgumentError(
            f"this model {'makes embeddings only' if info.labels is None else 'only classifies'}"
        )
    if not request.request_id:
        raise InvalidArgumentError("request_id is missing", field="request_id")
    if not is_valid_request_id(request.request_id):
        raise InvalidArgumentError("request_id is not 1 to 128 plain characters", field="request_id")
    if not request.token_ids:
        raise InvalidArgumentError("token_ids is empty: there is no prompt", field="token_ids")
    largest = max(request.token_ids)
    if largest >= info.vocab_size:
        raise InvalidArgumentError(
            f"token id {largest} is not below the vocabulary size {info.vocab_size}", field="token_ids"
        )
    if len(request.token_ids) >= info.context_length:
        raise InvalidArgumentError(
            f"prompt of {len(request.token_ids)} tokens leaves no room in the context of {info.context_length} tokens",
            field="token_ids",
        )
    if request.output_tokens > len(request.token_ids):
        raise InvalidArgumentError(
            f"output_tokens is {request.output_tokens}, more than the {len(request.token_ids)} token_ids",
            field="output_tokens",
        )


def to_continuations(
    request: worker_pb2.WorkerGenerateRequest, info: ModelInfo, count: int
) -> tuple[Continuation, ...]:
    """The tree that is to be scored; empty: the request generates.

    Raises:
        InvalidArgumentError: It is too large, no tree, or goes with something else.
    """
    nodes: list[Continuation] = []
    total = 0
    if len(request.continuations) > MOST_SCORED:
        raise InvalidArgumentError(
            f"{len(request.continuations)} nodes; there may be {MOST_SCORED}", field="continuations"
        )
    for index, node in enumerate(request.continuations):
        parent = node.parent if node.HasField("parent") else -1
        ids = node.token_ids[:]
        total += len(ids)
        if parent >= index:
            raise InvalidArgumentError(f"node {index}: a node's parent comes before it", field="continuations")
        if not ids or max(ids) >= info.vocab_size:
            raise InvalidArgumentError(
                f"node {index}: it has at least one token, each below the vocabulary size {info.vocab_size}",
                field="continuations",
            )
        if total > MOST_SCORED_TOKENS:
            raise InvalidArgumentError(f"more than {MOST_SCORED_TOKENS} tokens", field="continuations")
        nodes.append(Continuation(parent, ids))
    sampling = request.sampling
    given = request.HasField("grammar") or request.output_tokens or request.hand_off or sampling.logprobs
    if nodes and (given or count > 1 or sampling.HasField("prompt_logprobs")):
        raise InvalidArgumentError(
            "continuations are scored without grammar, output_tokens, hand_off, log probabilities and n",
            field="continuations",
        )
    return tuple(nodes)


def to_inputs(request: worker_pb2.WorkerEmbedRequest, info: ModelInfo) -> Iterator[list[int]]:
    """Yields the token ids of each input, cut if the model's files say so; each is made only when it is needed.

    Raises:
        InvalidArgumentError: One of them cannot be embedded; names ``inputs``.
    """
    if not info.embedding_size and info.labels is None:
        raise InvalidArgumentError("this model makes no embeddings")
    if not 1 <= len(request.inputs) <= MOST_EMBEDDED:
        raise InvalidArgumentError(f"{len(request.inputs)} inputs; there must be 1 to {MOST_EMBEDDED}", field="inputs")
    limits = [limit for limit in (info.embedded_tokens, request.max_tokens) if limit]
    for index, each in enumerate(request.inputs):
        ids = _cut(each.ids[:], min(limits, default=0), info.special_ids)
        if not 1 <= len(ids) <= info.context_length:
            problem = f"has {len(ids)} tokens; there must be 1 to {info.context_length}"
        elif max(ids) >= info.vocab_size:
            problem = f"has a token id that is not below the vocabulary size {info.vocab_size}"
        else:
            yield ids
            continue
        raise InvalidArgumentError(f"input {index} {problem}", field="inputs")


def _cut(token_ids: list[int], max_tokens: int, special_ids: tuple[int, ...]) -> list[int]:
    """Cuts an input to this many tokens, as tokenizers do: the special tokens at its end stay.

    Args:
        token_ids: The input.
        max_tokens: The most tokens; 0 for no limit.
        special_ids: Special tokens.
    """
    if not max_tokens or len(token_ids) <= max_tokens:
        return token_ids
    end = 0
    while end < max_tokens and token_ids[-1 - end] in special_ids:
        end += 1
    return token_ids[: max_tokens - end] + token_ids[len(token_ids) - end :]


def to_dimensions(request: worker_pb2.WorkerEmbedRequest, info: ModelInfo) -> int | None:
    """How many numbers of each vector are wanted; None: all.

    Raises:
        InvalidArgumentError: The model's vectors are not cut so.
    """
    wanted = request.dimensions
    if wanted in (0, info.embedding_size):
        return None
    if info.shortened is None:
        raise InvalidArgumentError(
            f"this model's embeddings have {info.embedding_size} numbers and are not cut", field="dimensions"
        )
    if wanted > info.embedding_size or (info.shortened and wanted not in info.shortened):
        allowed = ", ".join(map(str, info.shortened)) or f"at most {info.embedding_size}"
        raise InvalidArgumentError(f"dimensions is {wanted}; it must be {allowed}", field="dimensions")
    return int(wanted)


def to_pooling(pooling: worker_pb2.Pooling, info: ModelInfo) -> Pooling:
    """How to pool; the model's own way if the request does not say.

    Raises:
        InvalidArgumentError: There is no such pooling; or the model's hidden states become labels and no embedding, or the other
            way round.
    """
    wanted = _POOLING.get(pooling or from_pooling(info))
    if wanted is None:
        raise InvalidArgumentError(f"there is no pooling {pooling}", field="pooling")
    if (wanted == "labels") != (info.labels is not None):
        problem = "has no head that classifies" if info.labels is None else "only classifies: it makes no embeddings"
        raise InvalidArgumentError(f"this model {problem}", field="pooling")
    return wanted


def from_pooling(info: ModelInfo) -> worker_pb2.Pooling:
    """The model's own way to pool."""
    return next(number for number, name in _POOLING.items() if name == info.pooling)


def from_activation(info: ModelInfo) -> worker_pb2.Activation:
    """The function that turns the head's logits into scores."""
    return worker_pb2.ACTIVATION_UNSPECIFIED if info.labels is None else _ACTIVATION[info.labels.activation]


def to_terms(
    request: worker_pb2.WorkerGenerateRequest | worker_pb2.WorkerEmbedRequest,
    seconds: float | None,
    loaded: LoadedLora | None = None,
) -> Terms:
    """The request's priority, tenant, namespace, deadline and adapter.

    Args:
        request: The request.
        seconds: Seconds to its deadline; None if it has none.
        loaded: The adapter that it names; None: it names none.

    Raises:
        InvalidArgumentError: A name is too long.
    """
    if len(request.tenant) > LONGEST_TENANT:
        raise InvalidArgumentError(f"tenant has more than {LONGEST_TENANT} characters", field="tenant")
    namespace = to_namespace(request.cache_salt, loaded)
    return Terms(request.priority, request.tenant, namespace, seconds, 0 if loaded is None else loaded.facts.number)


def to_namespace(cache_salt: str, loaded: LoadedLora | None) -> bytes:
    """The namespace within which requests with this adapter share cached pages. Raises as :func:`to_terms`."""
    if len(cache_salt) > LONGEST_SALT:
        raise InvalidArgumentError(f"cache_salt has more than {LONGEST_SALT} characters", field="cache_salt")
    return cache_namespace(cache_salt, "" if loaded is None else loaded.digest)


def to_handoff(request: worker_pb2.WorkerGenerateRequest, roles: Collection[Role], count: int) -> Handoff:
    """Whether the prompt's pages are to be kept for another worker, and the ticket for those that another keeps.

    Args:
        request: The request.
        roles: This worker's now and before: a router may not know yet that it has changed.
        count: The number of continuations.

    Raises:
        InvalidArgumentError: This worker hands nothing off, or not that, or the ticket is none.
    """
    if request.hand_off and "prefill" not in roles:
        raise InvalidArgumentError("this worker hands nothing off: its role is not prefill", field="hand_off")
    if request.hand_off and count > 1:
        raise InvalidArgumentError(f"hand_off with {count} continuations; it must be one", field="hand_off")
    if not request.HasField("ticket"):
        return Handoff(request.hand_off)
    ticket = _from_ticket(request.ticket)
    return Handoff(request.hand_off, ticket if "decode" in roles else None)


def to_announced(
    announcement: worker_pb2.HandoffAnnouncement, roles: Collection[Role], loras: Loras
) -> AnnouncePages | None:
    """Pages that this worker may read ahead of a request; None: it was never to take any, or does not have the adapter yet.

    Raises:
        InvalidArgumentError: The ticket is none, or as :func:`to_namespace`.
    """
    if "decode" not in roles:
        return None
    loaded = None
    if announcement.lora_name:
        try:
            loaded = loras.held(announcement.lora_name)
        except NotFoundError:
            return None
    ticket = replace(_from_ticket(announcement.ticket), first_page=announcement.ticket.first_page)
    namespace = to_namespace(announcement.cache_salt, loaded)
    return AnnouncePages(ticket, array("I", announcement.token_ids).tobytes(), namespace)


def _from_ticket(given: worker_pb2.HandoffTicket) -> HandoffTicket:
    pages = len(given.page_hashes)
    if len(given.transfer_id) != _TRANSFER_ID_BYTES or len(given.places) != pages or len(given.place_epochs) != pages:
        raise InvalidArgumentError("the ticket is not one that a worker has made", field="ticket")
    return HandoffTicket(
        given.transfer_id,
        given.source,
        given.epoch,
        given.fingerprint,
        list(given.page_hashes),
        list(zip(given.places, given.place_epochs, strict=True)),
        given.lease_ms,
    )


def to_role(role: worker_pb2.WorkerRole) -> Role:
    """The worker's new role. Raises InvalidArgumentError if the message names none."""
    found = next((name for name, value in _ROLE.items() if value == role), None)
    if found is None:
        raise InvalidArgumentError("role is missing or unknown", field="role")
    return found


def from_role(role: Role) -> worker_pb2.WorkerRole:
    """A worker's role as it tells it."""
    return _ROLE[role]


def to_sampling(request: worker_pb2.WorkerGenerateRequest, info: ModelInfo, seeds: Seeds) -> tuple[SamplingParams, int]:
    """The sampling settings, and the number of continuations; ``max_tokens`` fits the context, ``seeds`` draws an absent seed.

    Raises:
        InvalidArgumentError: A setting is out of range; its field is named.
    """
    params, count = from_message(request.sampling, request.output_tokens, seeds, info.sampling_defaults)
    check_tokens(params, info.vocab_size)
    for call in params.logit_processors:
        if call.name not in info.logit_processors:
            known = ", ".join(info.logit_processors) or "none"
            raise InvalidArgumentError(
                f"there is no logit processor {call.name!r} here; installed are: {known}",
                field="sampling.logit_processors",
            )
    for name, wanted in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        _require((wanted or 0) <= info.vocab_size, name, wanted or 0, f"at most the vocabulary size {info.vocab_size}")
    max_tokens = min(info.context_length - len(request.token_ids), params.max_tokens)
    most = max_tokens + request.output_tokens
    _require(params.min_tokens <= most, "min_tokens", params.min_tokens, f"at most max_tokens, {most}")
    _require(1 <= count <= MOST_CONTINUATIONS, "n", count, f"in 1 .. {MOST_CONTINUATIONS}")
    return replace(params, max_tokens=max_tokens), count


# The token that ends a request, the model's own or one of stop_token_ids, is part of token_ids and counted in the
# usage: so a client that resumes from what it got has all of it. Detokenizers skip it.
def to_response(
    output: RequestOutput, lora_digest: bytes = b"", weight_version: str = ""
) -> worker_pb2.WorkerGenerateResponse:
    """One message of the answer; the first and the last carry the usage and the adapter's digest, the last the finish reason."""
    response = worker_pb2.WorkerGenerateResponse(
        token_ids=output.token_ids, index=output.index, weight_version=weight_version
    )
    if output.completion_tokens:
        response.position = output.completion_tokens - len(output.token_ids)
    if output.logprobs:
        response.logprobs.extend(map(_to_token_logprobs, output.logprobs))
    if output.prompt_logprobs:
        response.prompt_logprobs.extend(map(_to_token_logprobs, output.prompt_logprobs))
    if output.finish_reason == "handoff":
        assert output.ticket is not None
        response.ticket.CopyFrom(_to_ticket(output.ticket))
    elif output.finish_reason is not None:
        response.finish_reason = _FINISH[output.finish_reason]
    elif output.ticket is not None:
        response.announced.CopyFrom(_to_ticket(output.ticket))
    if output.finish_reason is not None or 0 < output.completion_tokens == len(output.token_ids):
        response.lora_digest = lora_digest
        response.usage.prompt_tokens = output.prompt_tokens
        response.usage.completion_tokens = output.completion_tokens
        response.usage.cached_tokens = output.cached_tokens
        response.usage.accepted_prediction_tokens = output.accepted_tokens
        response.usage.rejected_prediction_tokens = output.drafted_tokens - output.accepted_tokens
    return response


def is_one_token(output: RequestOutput) -> bool:
    """Whether :func:`to_response` would say nothing but one token of continuation 0."""
    return (
        len(output.token_ids) == 1
        and output.completion_tokens > 1
        and output.finish_reason is None
        and not (output.index or output.logprobs or output.prompt_logprobs)
    )


def _to_ticket(ticket: HandoffTicket) -> worker_pb2.HandoffTicket:
    return worker_pb2.HandoffTicket(
        transfer_id=ticket.transfer_id,
        source=ticket.source,
        epoch=ticket.epoch,
        fingerprint=ticket.fingerprint,
        page_hashes=ticket.page_hashes,
        places=[page for page, _ in ticket.places],
        place_epochs=[epoch for _, epoch in ticket.places],
        lease_ms=ticket.lease_ms,
        first_page=ticket.first_page,
    )


def _to_token_logprobs(given: TokenLogprobs) -> worker_pb2.TokenLogprobs:
    return worker_pb2.TokenLogprobs(logprob=given.logprob, top_ids=given.top_ids, top_logprobs=given.top_logprobs)


def to_load_report(load: Load, kv: KvEventStream) -> worker_pb2.LoadReport:
    """The load as a message."""
    return worker_pb2.LoadReport(
        running_requests=load.running_requests,
        waiting_requests=load.waiting_requests,
        queued_tokens=load.queued_tokens,
        used_pages=load.used_pages,
        evictable_pages=load.evictable_pages,
        num_pages=load.num_pages,
        prompt_tokens=load.prompt_tokens,
        cached_tokens=load.cached_tokens,
        epoch=kv.epoch,
        kv_seq=kv.seq,
        kv_digest=kv.digest,
        host_used_pages=load.host_used_pages,
        host_num_pages=load.host_num_pages,
        device_hit_tokens=load.device_hit_tokens,
        host_hit_tokens=load.host_hit_tokens,
        storage_hit_tokens=load.storage_hit_tokens,
        storage_id=load.storage_id,
        running_tokens=load.running_tokens,
    )


# Adapters.


def to_lora_report(loras: Loras) -> worker_pb2.LoraReport:
    """All adapters, as routers need to know them."""
    loads = loras.loads()
    return worker_pb2.LoraReport(
        loras=[_to_lora_state(known, loras) for known in loras.known()],
        slots=loras.slots,
        free_slots=loras.slots if loads is None else loads.unused,
    )


def to_lora_infos(loras: Loras) -> list[worker_pb2.LoraInfo]:
    """All adapters, as operators want to know them."""
    uses = loras.uses()
    return [to_lora_info(known, loras, uses) for known in loras.known()]


def to_lora_info(known: KnownLora, loras: Loras, uses: Mapping[str, LoraUse]) -> worker_pb2.LoraInfo:
    """An adapter, as operators want to know it; ``uses`` are its requests, by name."""
    info = worker_pb2.LoraInfo(
        state=_to_lora_state(known, loras), pinned=known.pinned, idle_seconds=loras.idle_seconds(known)
    )
    info.state.path = without_credentials(known.path)
    if known.loaded is not None:
        facts = known.loaded.facts
        info.rank, info.bytes = facts.rank, facts.bytes
        info.modules.extend(facts.modules)
    if (use := uses.get(known.name)) is not None:
        info.running_requests, info.waiting_requests = use.running, use.waiting
    return info


def _to_lora_state(known: KnownLora, loras: Loras) -> worker_pb2.LoraState:
    if known.loaded is not None:
        place = worker_pb2.LORA_PLACE_DEVICE if loras.on_device(known) else worker_pb2.LORA_PLACE_HOST
    else:
        place = worker_pb2.LORA_PLACE_SOURCE if known.loading is None else worker_pb2.LORA_PLACE_LOADING
    return worker_pb2.LoraState(
        name=known.name,
        path=known.path,
        version=known.version,
        digest=b"" if known.loaded is None else known.loaded.facts.digest,
        place=place,
    )


def to_kv_events(
    batch: KvEventBatch, block_size: int, name_of: Callable[[str], str] = lambda digest: "", *, token_ids: bool
) -> worker_pb2.SubscribeKvEventsResponse:
    """A batch of KV events as a message.

    Args:
        batch: The events.
        block_size: Tokens in a block.
        name_of: The name of the adapter with a digest.
        token_ids: Whether stored blocks come with their tokens.
    """
    return worker_pb2.SubscribeKvEventsResponse(
        epoch=batch.epoch,
        seq=batch.seq,
        events=[_to_kv_event(event, block_size, name_of, token_ids) for event in batch.events],
        snapshot=batch.snapshot,
        more=batch.more,
        digest=batch.digest,
    )


def _to_kv_event(event: KvEvent, block_size: int, name_of: Callable[[str], str], token_ids: bool) -> worker_pb2.KvEvent:
    match event:
        case BlockStored():
            stored = worker_pb2.BlockStored(
                block_hashes=split_hashes(event.hashes),
                parent_hash=event.parent,
                token_ids=array("I", event.token_ids) if token_ids else (),
                block_size=block_size,
                medium=_MEDIUM[event.medium],
                lora_name=name_of(event.lora) if event.lora else "",
                lora_digest=bytes.fromhex(event.lora),
            )
            return worker_pb2.KvEvent(block_stored=stored)
        case BlockRemoved(hashes, medium):
            removed = worker_pb2.BlockRemoved(block_hashes=split_hashes(hashes), medium=_MEDIUM[medium])
            return worker_pb2.KvEvent(block_removed=removed)
        case _:
            return worker_pb2.KvEvent(all_blocks_cleared=worker_pb2.AllBlocksCleared())


def _require(condition: bool, name: str, value: float, expected: str) -> None:
    if not condition:
        raise InvalidArgumentError(f"sampling.{name} is {value:g}; it must be {expected}", field=f"sampling.{name}")


# Converts between protobuf and the reports on the KV cache's tiers.


_TIERS: dict[TierName, worker_pb2.CacheTier] = {
    "device": worker_pb2.CACHE_TIER_DEVICE,
    "host": worker_pb2.CACHE_TIER_HOST,
    "storage": worker_pb2.CACHE_TIER_STORAGE,
}


def to_tier_stats(reports: Sequence[TierReport]) -> list[worker_pb2.CacheTierStats]:
    """The reports as messages."""
    messages = []
    for report in reports:
        fields = msgspec.structs.asdict(report)
        messages.append(worker_pb2.CacheTierStats(**fields | {"tier": _TIERS[report.tier]}))
    return messages


def to_tier_names(request: worker_pb2.ClearCacheRequest) -> list[str]:
    """The tiers to clear, in order; ``all`` for all that there are.

    Raises:
        InvalidArgumentError: A tier is unspecified or unknown.
    """
    names = {value: name for name, value in _TIERS.items()}
    for tier in request.tiers:
        if tier not in names:
            raise InvalidArgumentError(f"{tier} is not a tier", field="tiers")
    return [names[tier] for tier in dict.fromkeys(request.tiers)] or ["all"]
