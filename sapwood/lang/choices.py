"""How ``select`` chooses: three methods over the log probabilities of each choice's tokens.

Each method is a function of :class:`Scored` choices that gives one number a choice, or a list of numbers that are compared in
order; the first choice with the largest is chosen. O(tokens) each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scored:
    """How likely a choice is.

    Attributes:
        text: The choice.
        token_ids: Its tokens.
        logprobs: The log probability of each after the prompt and those before it.
        unconditional: The same without the prompt; the first is 0, for no model says it. Empty: nobody asked.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    unconditional: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """What was chosen: the place of the choice, and what the method counted for each."""

    index: int
    scores: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ChoicesMethod:
    """A way to choose.

    Attributes:
        name: What it is called.
        decide: Chooses.
        requires_unconditional: Whether it needs the choices' log probabilities without the prompt.
    """

    name: str
    decide: Callable[[Sequence[Scored]], Decision]
    requires_unconditional: bool = False


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _largest(scores: Sequence[float]) -> Decision:
    return Decision(max(range(len(scores)), key=lambda index: (scores[index], -index)), tuple(scores))


def _by_mean(choices: Sequence[Scored]) -> Decision:
    return _largest([_mean(choice.logprobs) for choice in choices])


def _greedy(choices: Sequence[Scored]) -> Decision:
    """Token by token the likeliest stay; a choice that has ended goes on with its own mean."""
    means = [_mean(choice.logprobs) for choice in choices]
    left = list(range(len(choices)))
    for place in range(max(len(choice.logprobs) for choice in choices)):
        here = {i: choices[i].logprobs[place] if place < len(choices[i].logprobs) else means[i] for i in left}
        best = max(here.values())
        left = [index for index in left if here[index] == best]
    return Decision(left[0], tuple(means))


def _by_gain(choices: Sequence[Scored]) -> Decision:
    """The prompt makes the choice likelier by this much a token: what is likely everywhere gains nothing."""
    return _largest(
        [_mean([a - b for a, b in zip(each.logprobs, each.unconditional, strict=True)]) for each in choices]
    )


token_length_normalized = ChoicesMethod("token_length_normalized", _by_mean)
"""The largest mean log probability of a token."""
greedy_token_selection = ChoicesMethod("greedy_token_selection", _greedy)
"""What greedy decoding would write, were only the choices allowed."""
unconditional_likelihood_normalized = ChoicesMethod("unconditional_likelihood_normalized", _by_gain, True)
"""The largest mean gain in log probability over the choice without its prompt."""
