"""Picks backends for requests that a gateway carries: an endpoint picker. The gateway says how each request went on.

Picked requests pass admission, policies, breakers, allowances and metrics as those do that the router carries itself. How a
request goes is known only as far as the gateway says: which backend served it, with which status, and what it answered.
"""

from __future__ import annotations

import ipaddress
import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from sapwood_common.errors import NotFoundError, SapwoodError, UnavailableError
from sapwood_router.fleet.circuit_breaker import Outcome, Permit, outcome_of
from sapwood_router.fleet.eligibility import Demand, eligible
from sapwood_router.fleet.worker import Lease, Worker
from sapwood_router.flow.attempts import Shared, acquire
from sapwood_router.flow.relay.asked import Asked, pseudo_tokens
from sapwood_router.flow.relay.progress import SALTED
from sapwood_router.flow.select import choose
from sapwood_router.observe.observer import RequestObserver, RequestWatch
from sapwood_router.request.context import RequestContext, Usage
from sapwood_router.routing.policies.base import Choice, PromptPages
from sapwood_router.routing.policy_book import Shadowed
from sapwood_router.transport.name_lookup import Lookup

logger = logging.getLogger(__name__)

_FALLBACKS = 2
"""Endpoints that are named for the case that the first does not answer."""
_NAME_SECONDS = 30.0
"""For how long a backend's address is remembered."""
_MOST_NAMES = 4096


class Endpoints:
    """The addresses of backends, ``ip:port``, as gateways know them.

    Args:
        lookup: Asks for the addresses behind a name.
        clock: Seconds, monotonic.
    """

    def __init__(self, lookup: Lookup, clock: Callable[[], float] = time.monotonic) -> None:
        self._lookup = lookup
        self._clock = clock
        self._known: dict[str, tuple[str, float]] = {}
        """Of each URL with a name the endpoint, and when it was asked for."""

    async def of(self, workers: Collection[Worker]) -> dict[Worker, str]:
        """The endpoints of backends. A backend whose name nobody knows has none."""
        found: dict[Worker, str] = {}
        for worker in workers:
            if worker.backend is not None and (endpoint := await self._of(worker.backend.spec.url)):
                found[worker] = endpoint
        return found

    async def _of(self, url: str) -> str:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        try:
            return f"[{host}]:{port}" if ipaddress.ip_address(host).version == 6 else f"{host}:{port}"
        except ValueError:
            pass
        known, at = self._known.get(url, ("", -_NAME_SECONDS))
        if self._clock() - at < _NAME_SECONDS:
            return known
        try:
            known = min(await self._lookup(host, port), default="")
        except OSError as error:  # what was known stays
            logger.warning("address of %s: %s", url, error)
        if len(self._known) >= _MOST_NAMES:  # of workers that came and went
            self._known.clear()
        self._known[url] = known, self._clock()
        return known


class Picker:
    """Picks.

    Args:
        shared: Registry, policies and rules.
        observer: Counts and traces requests.
        endpoints: Knows the backends' addresses.
    """

    def __init__(self, shared: Shared, observer: RequestObserver, endpoints: Endpoints) -> None:
        self._shared = shared
        self._observer = observer
        self._endpoints = endpoints

    def begin(self, context: RequestContext) -> Pick:
        """A request came. The caller ends it, whatever becomes of it."""
        return Pick(self._shared, self._endpoints, context, self._observer.watch(context))


class Pick:
    """One request that a gateway carries: it is begun, a backend is picked, it may be served, and it ends.

    Attributes:
        destinations: The endpoints in order: each serves it if those before it do not answer.
    """

    def __init__(self, shared: Shared, endpoints: Endpoints, context: RequestContext, watch: RequestWatch) -> None:
        self._shared = shared
        self._endpoints = endpoints
        self._context = context
        self._watch = watch
        self._prompt = PromptPages(())
        self._by_endpoint: dict[str, Worker] = {}
        self._policy: Shadowed | None = None
        self._worker: Worker | None = None
        self._lease: Lease | None = None
        self._permit: Permit | None = None
        self._answered = False
        self._over = False
        self._most: int | None = None
        """The most tokens that an answer can have; None: nobody says."""
        self.destinations: tuple[str, ...] = ()

    async def choose(self, body: Mapping[str, Any], subset: Collection[str] | None) -> None:
        """Picks the backend, as soon as the request may have one.

        Args:
            body: The request's, empty if it has none.
            subset: Endpoints that may be picked; None: any.

        Raises:
            NotFoundError: No backend has the model.
            ResourceExhaustedError: The request would wait too long, or its tenant's rate is used up.
            UnavailableError: No backend can take it.
        """
        context, shared = self._context, self._shared
        registry, caller = shared.registry, context.caller
        model = context.model = self._model(body)
        self._policy = shared.policies.of(model)
        self._prompt = PromptPages(pseudo_tokens(body), caller.session, caller.cache_salt)
        estimate = len(self._prompt.token_ids)
        self._most = Asked("chat", body, context).most_tokens(registry.context_length(model))
        endpoints = await self._endpoints.of([each for each in registry.all() if _serves(each, model)])
        if caller.account is not None:
            caller.account.take_prompt(context.prompt, estimate)
        with self._watch.stage("queue"):
            place = shared.admission.reserve(model, caller, estimate, context.deadline)
            try:
                if not place.ready():
                    await place.turn()
            finally:
                place.leave()
        with self._watch.stage("select"):
            refused = {
                worker.address
                for worker in registry.available(model)
                if worker not in endpoints or (subset is not None and endpoints[worker] not in subset)
            }
            worker, choice = choose(self._demand(refused), self._prompt, registry, self._policy)
        self._acquire(worker, choice)
        others = _others(registry.available(model), self._demand(refused | {worker.address}))
        self._by_endpoint = {endpoints[each]: each for each in (worker, *others)}
        self.destinations = tuple(self._by_endpoint)
        self._watch.selected(choice.reason)

    def _model(self, body: Mapping[str, Any]) -> str:
        """The model that is asked for; of a request without a body, such as a listing, one that a backend has."""
        registry, model = self._shared.registry, self._context.model
        if not body and len(models := [name for name in registry.models() if registry.relays(name)]) > 1:
            return min(models, key=lambda name: min(each.in_flight for each in registry.available(name)))
        found = registry.resolve_any(model)
        if not any(_serves(each, found) for each in registry.all()):
            raise NotFoundError(f"no HTTP worker has the model {found!r}: others are asked over gRPC", field="model")
        return found

    def _demand(self, refused: Collection[str]) -> Demand:
        return Demand(self._context.model or "", 0, "model", refused_by=refused, relayed=True)

    def _acquire(self, worker: Worker, choice: Choice) -> None:
        context = self._context
        assert self._policy is not None
        self._lease, self._permit = acquire(worker, choice, self._prompt, self._policy, context.caller.tenant)
        self._worker = worker
        context.worker, context.reason = choice.address, choice.reason

    def changed_body(self, body: Mapping[str, Any], named: str | None) -> bytes | None:
        """The body as the backend is to have it: with its own name of the model, and with the salt that keeps tenants apart.

        Args:
            body: As it came.
            named: The model that it names; None: it names none, or has no JSON.

        Returns:
            None: as it came.
        """
        assert self._worker is not None and self._worker.backend is not None, "a backend was picked"
        backend, salt = self._worker.backend, self._context.caller.cache_salt
        changes: dict[str, Any] = {}
        if named is not None and backend.model and backend.model != named:
            changes["model"] = backend.model
        if named is not None and salt and backend.owner in SALTED:
            changes["cache_salt"] = salt
        return msgspec.json.encode({**body, **changes}) if changes else None

    @property
    def prompt_tokens(self) -> int:
        """About how many tokens the prompt has."""
        return len(self._prompt.token_ids)

    def served(self, endpoint: str) -> bool:
        """The gateway says which endpoint serves the request. One of the others: those before it have not answered.

        Returns:
            Whether it is the one that was picked.
        """
        worker = self._by_endpoint.get(endpoint)
        if worker is self._worker:
            return True
        if worker is not None and not self._answered:
            context = self._context
            before, failed = self._worker, UnavailableError("the gateway went to another endpoint")
            assert before is not None and self._policy is not None
            self._policy.failed(before.address, _page_size(before), self._prompt)
            self._release(outcome_of(failed))
            self._watch.retried(failed)
            self._acquire(worker, Choice(worker.address, "fallback"))
            context.resumptions += 1
        return False

    def answers(self, error: SapwoodError | None) -> None:
        """The answer begins: with None a good one."""
        if self._answered or self._permit is None:
            return
        self._answered = True
        self._context.error = error
        self._permit.end(Outcome.SUCCESS if error is None else outcome_of(error))

    def delta(self, tokens: int) -> None:
        """Part of the answer passed, which has about so many tokens."""
        now = time.perf_counter()
        if self._context.first_token is None:
            self._context.first_token = now
            if self._lease is not None:
                self._lease.prefilled()
        if self._worker is not None:
            self._worker.generated.add(tokens)
        self._watch.delta(now, tokens)

    def refuse(self, error: SapwoodError) -> None:
        """The request is answered with an error by the picker."""
        self._context.error = error.with_traceback(None)

    def end(self, usage: Usage | None) -> None:
        """The request is over. May be called again.

        Args:
            usage: Of a whole answer; None: the client left, or the gateway did not say.
        """
        if self._over:
            return
        self._over = True
        context, worker = self._context, self._worker
        if usage is not None and context.error is None:
            if self._most is not None:  # a backend's lie must not use up a key's rate
                usage = replace(usage, completion_tokens=min(self._most, usage.completion_tokens))
            context.usage, context.cached_tokens = usage, usage.cached_tokens
            if context.caller.account is not None:
                context.caller.account.take_output(usage.completion_tokens)
        if worker is not None and self._policy is not None:
            if context.error is None:
                self._policy.finished(worker.address, _page_size(worker), self._prompt, ())
            else:
                self._policy.failed(worker.address, _page_size(worker), self._prompt)
        self._release(Outcome.NEUTRAL)
        self._watch.close()
        context.error = None

    def _release(self, outcome: Outcome) -> None:
        if self._permit is not None and self._lease is not None:
            self._permit.end(outcome)
            self._lease.release()
        self._permit = self._lease = None


def _others(workers: Collection[Worker], demand: Demand) -> list[Worker]:
    """Backends that could have been picked as well, the least busy first."""
    try:
        found = eligible(workers, demand).workers
    except SapwoodError:
        return []
    return sorted(found, key=lambda each: (each.view().requests, each.view().queued_tokens))[:_FALLBACKS]


def _serves(worker: Worker, model: str) -> bool:
    return worker.backend is not None and worker.model is not None and worker.model.model == model


def _page_size(worker: Worker) -> int:
    assert worker.model is not None, "it was chosen for its model"
    return worker.model.page_size
