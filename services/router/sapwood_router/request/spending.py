"""What one request takes of its tenant's tokens, in however many prompts and continuations it is computed."""

from __future__ import annotations

from dataclasses import dataclass, field

from sapwood_common.tenants.tenant import Tenant


@dataclass(slots=True)
class Spending:
    """What one request takes of its tenant's allowance.

    A request is let in or refused as a whole. If each of its prompts had to find tokens left, a request of more than the
    allowance's burst could never be served: some of its prompts would be refused after others were computed.

    Attributes:
        tenant: Whose.
        prompts: Those that were let in, by identity.
    """

    tenant: Tenant
    prompts: dict[int, object] = field(default_factory=dict)

    def take_prompt(self, prompt: object, tokens: int) -> None:
        """Takes the tokens of one of its prompts, once for all continuations of it, as the usage counts them.

        Raises:
            ResourceExhaustedError: It is the first, and the tenant has none left for now; nothing was taken.
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
