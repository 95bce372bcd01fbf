"""What the requests of ``/score``, ``/rerank`` and ``/classify`` have in common."""

from __future__ import annotations

from sapwood_router.edges.openai.types import AnyRequest


class CompareRequest(AnyRequest, kw_only=True):
    """Whether logits become scores, by the names that newer and older versions of vLLM have for it."""

    use_activation: bool | None = None
    activation: bool | None = None

    @property
    def uses_activation(self) -> bool | None:
        """What is given; None: nothing."""
        return self.activation if self.use_activation is None else self.use_activation
