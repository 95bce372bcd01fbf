"""Asks a server every item and looks at its answers."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sapwood.bench.data.conversation import Api, Ask, Prompt
from sapwood.bench.data.json_lines import DataError
from sapwood.bench.stopping import unless_stopped
from sapwood.bench.targets.record import Record
from sapwood.bench.targets.target import Target
from sapwood.evaluation.items import Choice, Item, Open


@dataclass(frozen=True, slots=True)
class Scored:
    """The result of an item.

    Attributes:
        item: The item.
        answer: The model's answer, or the likeliest choice.
        right: Whether it is right.
        right_by_length: Whether the choice that is likeliest for each byte of its length is right; without choices, ``right``.
        error: Why there is no answer; empty if there is one.
    """

    item: Item
    answer: str = ""
    right: bool = False
    right_by_length: bool = False
    error: str = ""


class Evaluation:
    """Scores items.

    Args:
        target: Is asked.
        api: How prompts are put to it.
        shots: So many items of each task, the first ones, are shown with their answers before each other prompt of it, and are
            not scored.
        concurrency: Requests at a time.
        on_progress: Called with the number of items done and of all, after each.
    """

    def __init__(
        self,
        target: Target,
        api: Api,
        *,
        shots: int = 0,
        concurrency: int = 8,
        on_progress: Callable[[int, int], None] = lambda done, of: None,
    ) -> None:
        self._target = target
        self._api = api
        self._shots = shots
        self._concurrency = concurrency
        self._on_progress = on_progress
        self._stop = asyncio.Event()
        self.scored: list[Scored] = []
        self.model = ""

    def stop(self) -> None:
        """Ends it: :meth:`run` returns soon, with what was scored."""
        self._stop.set()

    @property
    def stopped(self) -> bool:
        """Whether it was ended before its end."""
        return self._stop.is_set()

    async def run(self, items: Sequence[Item]) -> list[Scored]:
        """Connects and asks; yields the items' results in the order in which they were done.

        Raises:
            TargetError: The server cannot be asked.
            DataError: A task has too few items for the examples, or an example has no answer to show; or choices are asked for
                by a chat, which cannot score them.
        """
        examples, rest = self._split(items)
        todo = iter(rest)

        async def work() -> None:
            for item in todo:
                self.scored.append(await self._score(item, examples[item.task]))
                self._on_progress(len(self.scored), len(rest))

        async def all_work() -> None:
            self.model = await self._target.connect()
            async with asyncio.TaskGroup() as group:
                for _ in range(self._concurrency):
                    group.create_task(work())

        await unless_stopped(all_work(), self._stop)
        return self.scored

    def _split(self, items: Sequence[Item]) -> tuple[dict[str, list[Item]], list[Item]]:
        """The examples of each task, and the items that are scored."""
        examples: dict[str, list[Item]] = defaultdict(list)
        rest: list[Item] = []
        for item in items:
            (examples[item.task] if len(examples[item.task]) < self._shots else rest).append(item)
        for task, shown in examples.items():
            if not any(item.task == task for item in rest):
                raise DataError(f"task {task} has no item left besides its {len(shown)} examples")
            if any(not item.example for item in shown):
                raise DataError(f"task {task}: an item that others are shown needs the field example")
        if self._api == "chat" and any(isinstance(item, Choice) for item in rest):
            raise DataError(
                "choices are compared by --api completions only: a chat tells no probabilities of its prompt"
            )
        return examples, rest

    async def _score(self, item: Item, examples: Sequence[Item]) -> Scored:
        if isinstance(item, Choice):
            return await self._score_choice(item, examples)
        return await self._score_open(item, examples)

    async def _score_open(self, item: Open, examples: Sequence[Item]) -> Scored:
        record = Record()
        await self._target.ask(Ask(self._prompt(item, examples), item.max_tokens, stop=item.stop), record)
        if record.error:
            return Scored(item, error=_explain(record))
        right = item.is_right(record.text)
        return Scored(item, record.text, right, right)

    async def _score_choice(self, item: Choice, examples: Sequence[Item]) -> Scored:
        """Compares how likely each choice is after the prompt: its tokens are those that the prompt alone does not have."""
        prompt = "".join(f"{joined(each.prompt, each.example)}\n\n" for each in examples) + item.prompt
        record = Record()
        before = await self._target.score(prompt, record)
        if record.error:
            return Scored(item, error=_explain(record))
        sums = []
        for choice in item.choices:
            record = Record()
            found = await self._target.score(joined(prompt, choice), record)
            if record.error:
                return Scored(item, error=_explain(record))
            if len(found) <= len(before):
                return Scored(item, error=f"choice {choice!r} adds no token to the prompt")
            sums.append(sum(found[len(before) :]))
        by_length = [each / len(choice.encode()) for each, choice in zip(sums, item.choices, strict=True)]
        chosen = sums.index(max(sums))
        return Scored(item, item.choices[chosen], chosen == item.right, by_length.index(max(by_length)) == item.right)

    def _prompt(self, item: Item, examples: Sequence[Item]) -> Prompt:
        if self._api == "completions":
            return "".join(f"{joined(each.prompt, each.example)}\n\n" for each in examples) + item.prompt
        messages = []
        for each in examples:
            messages += [{"role": "user", "content": each.prompt}, {"role": "assistant", "content": each.example}]
        return [*messages, {"role": "user", "content": item.prompt}]


def joined(prompt: str, answer: str) -> str:
    """Prompt and answer, with a space between where neither has white space there."""
    return f"{prompt}{'' if prompt[-1].isspace() or answer[0].isspace() else ' '}{answer}"


def _explain(record: Record) -> str:
    return f"{record.error}: {record.message}" if record.message else record.error
