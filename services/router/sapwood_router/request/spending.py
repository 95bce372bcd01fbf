"""What one request takes of its tenant's tokens, in however many prompts and continuations it is computed."""

from __future__ import annotations

from dataclasses import dataclass, field

from sapwood_common.tenants.tenant import Tenant


@dataclass(slots=True)
class Spending:
    """One request's. It is let in or refused as a whole: were each of its prompts asked for anew whether any tokens are left, a
    request with more than the allowance's burst would be refused whenever it came, after part of it was computed.

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
