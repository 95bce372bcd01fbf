"""Drafters that know the answer and get a share of it wrong, and prompts whose answers copy: for ``bench_speculation.py``."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.speculation.drafter import HostDrafter
from sapwood_worker.model.runner.drafting_runner import DraftingRunner
from sapwood_worker.model.runner.graphs.decode_rows import DraftedTokens
from sapwood_worker.model.runner.model_runner import LaunchedStep
from sapwood_worker.records.step import IntArray, ModelOutput, Step

LISTING = """def total(orders, rates):
    result = {}
    for order in orders:
        name = order.customer.name
        price = sum(line.price * line.count for line in order.lines)
        price -= price * order.customer.discount / 100
        result[name] = result.get(name, 0) + price * rates[order.currency]
    return result


def report(orders, rates, path):
    with open(path, "w") as file:
        for name, price in sorted(total(orders, rates).items()):
            file.write(f"{name:30} {price:12.2f}\\n")


def overdue(orders, today):
    found = []
    for order in orders:
        if order.paid is None and (today - order.sent).days > order.customer.days:
            found.append(order)
    return sorted(found, key=lambda order: order.sent)
"""


class Dial(HostDrafter):
    """Implements :class:`Drafter` with the answers themselves, of which it knows a share.

    Args:
        answers: By the request's name.
        right: The share.
    """

    name = "dial"

    def __init__(self, answers: Mapping[str, list[int]], right: float) -> None:
        self._answers = answers
        self._right = right

    def begin(self, request: Request) -> DialRow:
        chance, right = random.Random(request.serial), self._right
        answer = self._answers[request.request_id]
        guesses = [token if chance.random() < right else token ^ 1 for token in answer]
        return DialRow(request, guesses)


class DialRow:
    """Implements :class:`RowDrafter`."""

    def __init__(self, request: Request, guesses: list[int]) -> None:
        self._request = request
        self._guesses = guesses
        self._followed = request.generated

    def follow(self) -> tuple[int, int]:
        start, self._followed = self._followed, self._request.generated
        output = self._request.token_ids[self._request.prompt_length + start :]
        right = sum(token == guess for token, guess in zip(output, self._guesses[start:], strict=False))
        return right, len(output) - right

    def propose(self, unknown: int, most: int) -> list[int]:
        start = self._request.generated + unknown
        return self._guesses[start : start + most]


class DialledRunner:
    """Runs a draft model, and says what the dial says.

    Args:
        runner: The draft model's.
        prompts: Of the requests; a request is that of its serial number modulo their number.
        answers: To these, by their place.
        right: The share that it knows.
    """

    def __init__(
        self, runner: DraftingRunner, prompts: Sequence[list[int]], answers: Mapping[int, list[int]], right: float
    ) -> None:
        self.asynchronous = runner.asynchronous
        self._runner = runner
        self._prompts = prompts
        self._answers = answers
        self._right = right
        self._serials: dict[int, int] = {}

    def execute(self, step: Step) -> ModelOutput:
        return self.launch(step).result()

    def launch(self, step: Step) -> DialledStep:
        for entry in step.entries:
            self._serials[entry.row] = entry.serial
        places = [
            self._say(self._serials[row], position) if samples else []
            for row, position, samples in zip(
                step.rows.tolist(), (step.starts + step.counts).tolist(), step.samples.tolist(), strict=True
            )
        ]
        launched = self._runner.launch(step)
        assert isinstance(launched, LaunchedStep)
        return DialledStep(launched, places)

    def launch_chain(self, first: Step, wanted: IntArray, reach: IntArray) -> DraftedTokens | None:
        for entry in first.entries:
            self._serials[entry.row] = entry.serial
        made = self._runner.launch_chain(first, wanted, reach)
        if made is None:
            return None
        serials = [self._serials[row] for row in first.rows.tolist()]
        ends = (first.starts + first.counts).tolist()
        said = [
            [self._say(serial, end + place)[0] for serial, end in zip(serials, ends, strict=True)]
            for place in range(1 + int(wanted.max()))
        ]
        with torch.inference_mode():
            ops = self._runner.ops
            return DraftedTokens([ops.to_device(np.array(said, np.int64).ravel())], ops, made.begun)

    def _say(self, serial: int, position: int) -> list[int]:
        which = serial % len(self._prompts)
        place = position - len(self._prompts[which])
        answer = self._answers[which]
        token = answer[place] if place < len(answer) else 0
        return [token if random.Random(serial * 1_000_003 + position).random() < self._right else token ^ 1]


class DialledStep:
    """A step of :class:`DialledRunner`."""

    def __init__(self, launched: LaunchedStep, token_ids: list[list[int]]) -> None:
        self._launched = launched
        self._token_ids = token_ids

    def check(self) -> None:
        self._launched.check()

    def result(self) -> ModelOutput:
        answer = self._launched.result()
        answer.token_ids = self._token_ids
        return answer


def file_prompt(chance: random.Random, right: float) -> list[int]:
    """A file of 2048 tokens and its first token again, after which the walk continues as it does, but for changes, in the
    file."""
    first = chance.randrange(10, 28_000)
    file = [at if chance.random() < right else at + 40_000 for at in range(first, first + 2048)]
    return [*file, first]


def edit_prompt(demo: Path, number: int) -> list[int]:
    """The tokens of a listing that stands there already and is begun again with another name for a variable."""
    from sapwood_tokenizer.vocab.loader import load_tokenizer  # not everywhere where this runs

    text = f"# version {number}\n{LISTING}\n\n# version {number}\n{LISTING}\n\n# version {number + 1}\ndef total(items, rates):\n"
    return list(load_tokenizer(demo).tokenizer.encode(text).ids)
