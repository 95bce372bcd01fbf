"""Who asks, and how a request is to be treated for it: what the edges read from metadata and headers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from sapwood_common.contract.limits import LONGEST_TENANT, MOST_PRIORITY
from sapwood_common.errors import InvalidArgumentError
from sapwood_common.tenants.tenant import Tenant, mint_salt
from sapwood_router.request.objective import Objective, objective_of


@dataclass(slots=True)
class Spending:
    """What one request takes of its tenant's allowance.

    A request is accepted or refused as a whole. If each of its prompts had to find tokens left, a request of more than the
    allowance's burst could never be served: some of its prompts would be refused after others were computed.

    Attributes:
        tenant: Whose.
        prompts: The accepted prompts, by identity.
    """

    tenant: Tenant
    prompts: dict[int, object] = field(default_factory=dict)

    def take_prompt(self, prompt: object, tokens: int) -> None:
        """Charges the tokens of one of its prompts to the tenant, once for all continuations, as the usage counts them.

        Raises:
            ResourceExhaustedError: The prompt is the first, and the tenant has no tokens left for now; nothing was charged.
        """
        if id(prompt) in self.prompts:
            return
        if self.prompts:
            self.tenant.take_output(tokens)
        else:
            self.tenant.take_prompt(tokens)
        self.prompts[id(prompt)] = prompt

    def take_output(self, tokens: int) -> None:
        """Takes generated tokens."""
        self.tenant.take_output(tokens)


TENANT_KEY = "x-tenant"
PRIORITY_KEY = "x-priority"
SESSION_KEY = "x-session-id"

_LONGEST_SESSION = 128


@dataclass(frozen=True, slots=True)
class Caller:
    """Attributes of a request's caller.

    Attributes:
        tenant: The tenant whose share of a busy cluster it uses: the name of its API key; without keys, the name in the request.
        weight: How large that share is, relative to others'.
        cache_salt: Workers share what they cached only among requests with the same one. Made here, never by the client.
        priority: -100 to 100; larger goes first where requests wait.
        session: What consistent_hash keeps on one worker; empty for nothing.
        account: What this request takes of the tenant's allowance; None where no keys are asked for.
        objective: When its tokens are to come; None: nobody says.
    """

    tenant: str = ""
    priority: int = 0
    session: str = ""
    weight: float = 1.0
    cache_salt: str = ""
    account: Spending | None = None
    objective: Objective | None = None


NOBODY = Caller()


def caller_of(get: Callable[[str], str | None], account: Tenant | None) -> Caller:
    """The caller that metadata or headers name. To be called once a request.

    Args:
        get: The value of a key, None if it is not there.
        account: Whose its API key is, if keys are asked for.

    Raises:
        InvalidArgumentError: A value makes no sense.
    """
    tenant = get(TENANT_KEY) if account is None else account.name
    priority, session = get(PRIORITY_KEY), get(SESSION_KEY)
    settings = None if account is None else account.settings
    given = 0 if settings is None or not priority else priority_of(priority)
    is_background = settings is not None and given < min(0, settings.priority)
    objective = objective_of(get, settings, usual=not is_background)
    if not tenant and not priority and not session and objective is None:
        return NOBODY
    for key, value, longest in ((TENANT_KEY, tenant, LONGEST_TENANT), (SESSION_KEY, session, _LONGEST_SESSION)):
        if value is not None and len(value) > longest:
            raise InvalidArgumentError(f"{key} is longer than {longest} characters", field=key)
    if account is not None:
        settings = account.settings
        return Caller(
            settings.name,
            _priority_within(priority, settings.priority),
            session or "",
            settings.weight,
            settings.cache_salt,
            Spending(account),
            objective,
        )
    # Without keys the tenant is whom a gateway in front names: its tenants are kept apart, too.
    salt = mint_salt(tenant) if tenant else ""
    return Caller(tenant or "", priority_of(priority), session or "", cache_salt=salt, objective=objective)


def in_session(caller: Caller, session: str) -> Caller:
    """The caller, with the session that a body names. A long name counts by its digest: policies keep names of many requests."""
    if len(session) > _LONGEST_SESSION:
        session = blake2b(session.encode(), digest_size=16).hexdigest()
    return replace(caller, session=session)


def priority_of(value: str | None) -> int:
    """A request's priority, 0 if it says nothing of it. Raises InvalidArgumentError where it makes no sense."""
    if not value:
        return 0
    try:
        number = int(value)
    except ValueError:
        number = MOST_PRIORITY + 1
    if not -MOST_PRIORITY <= number <= MOST_PRIORITY:
        raise InvalidArgumentError(
            f"{PRIORITY_KEY} must be a whole number in -{MOST_PRIORITY}..{MOST_PRIORITY}, got {value[:20]!r}",
            field=PRIORITY_KEY,
        )
    return number


def _priority_within(value: str | None, most: int) -> int:
    """The priority of a request whose tenant may have at most ``most``. Raises InvalidArgumentError as :func:`priority_of`."""
    number = priority_of(value) if value else min(0, most)
    if number > most:
        raise InvalidArgumentError(f"{PRIORITY_KEY} may be at most {most} with this API key", field=PRIORITY_KEY)
    return number
