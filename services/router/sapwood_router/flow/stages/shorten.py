"""Makes a conversation fit a model's context: the oldest turns are left out, as few as will do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from msgspec.structs import replace

from sapwood_common.errors import PromptTooLongError
from sapwood_router.request.context import ChatPrompt, Turn
from sapwood_router.tokenizer.client import EncodedChat


async def shortened(
    prompt: ChatPrompt, encode: Callable[[ChatPrompt], Awaitable[EncodedChat]], most: int
) -> EncodedChat:
    """The tokens of a conversation, or of what is left of it.

    What the system says at the start stays, and so do the user's last turn and all of the last answer's call. A call goes
    together with its results. O(log(turns)) conversations are encoded.

    Args:
        prompt: The conversation.
        encode: Encodes one.
        most: Tokens that it may have.

    Raises:
        PromptTooLongError: What must stay is longer.
        SapwoodError: As ``encode``.
    """

    async def fit(turns: tuple[Turn, ...]) -> EncodedChat | PromptTooLongError:
        try:
            encoded = await encode(replace(prompt, turns=turns))
        except PromptTooLongError as error:
            return error
        tokens = len(encoded.token_ids)
        return encoded if tokens <= most else PromptTooLongError.of(tokens, most, field="messages")

    best = await fit(prompt.turns)
    if isinstance(best, EncodedChat):
        return best
    cuts = _cuts(prompt.turns)
    least, beyond = 0, len(cuts)
    while least < beyond:  # the first cut that fits
        middle = (least + beyond) // 2
        found = await fit(cuts[middle]())
        if isinstance(found, EncodedChat):
            best, beyond = found, middle
        else:
            least = middle + 1
            best = found if isinstance(best, PromptTooLongError) else best
    if isinstance(best, PromptTooLongError):
        raise best
    return best


def _cuts(turns: Sequence[Turn]) -> list[Callable[[], tuple[Turn, ...]]]:
    """Makes what is left of a conversation: each of these leaves out more than the one before.

    First go the user's turns before the last one, each with all that was answered to it; then what the assistant did since the
    last one.
    """
    start = next((index for index, turn in enumerate(turns) if turn.role != "system"), len(turns))
    asked = [index for index in range(start, len(turns)) if turns[index].role == "user"]
    cuts: list[Callable[[], tuple[Turn, ...]]] = []

    def leave(keeps: int, goes_on: int) -> None:
        cuts.append(lambda: (*turns[:start], *turns[keeps : keeps + 1], *turns[goes_on:]))

    for index in asked:
        if index > start:
            leave(index, index + 1)
    last = asked[-1] if asked else start - 1
    for index in range(last + 2, len(turns)):
        if turns[index].role != "tool":
            leave(last, index) if asked else leave(index, index + 1)
    return cuts
