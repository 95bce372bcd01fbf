"""Which data a benchmark asks for, by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sapwood.bench.data import synthetic
from sapwood.bench.data.conversation import Api, Conversation, Conversations
from sapwood.bench.data.files import read_prompts, read_sharegpt, shuffled
from sapwood.bench.data.json_lines import DataError
from sapwood.bench.data.lengths import Lengths
from sapwood.bench.data.trace import TraceRow, trace_prompts
from sapwood.bench.data.words import PromptMaker, TokenIdMaker, WordMaker

Dataset = Literal["random", "shared-prefix", "multi-turn", "json-schema", "sharegpt", "file"]
DATASETS: tuple[Dataset, ...] = ("random", "shared-prefix", "multi-turn", "json-schema", "sharegpt", "file")
_FROM_FILE = ("sharegpt", "file")


@dataclass(frozen=True, slots=True)
class Source:
    """Where conversations come from.

    Attributes:
        dataset: One of :data:`DATASETS`.
        inputs: Tokens of a prompt, or of each turn.
        outputs: The most tokens of an answer.
        groups: How many beginnings ``shared-prefix`` has.
        prefix: The same: tokens of a beginning.
        turns: Turns of a conversation of ``multi-turn`` and ``sharegpt``.
        schema: The schema that answers of ``json-schema`` match.
        path: The file of ``sharegpt`` and ``file``.
        trace: Rows of a trace, whose lengths are then taken in place of a dataset.
        block_tokens: Tokens of a trace's blocks.
        token_ids: Prompts are token ids from this range, both ends included; None: words.
    """

    dataset: Dataset = "random"
    inputs: Lengths = field(default=Lengths(128, 128))
    outputs: Lengths = field(default=Lengths(32, 32))
    groups: int = 8
    prefix: Lengths = field(default=Lengths(512, 512))
    turns: Lengths = field(default=Lengths(4, 4))
    schema: dict[str, Any] | None = None
    path: Path | None = None
    trace: tuple[TraceRow, ...] = ()
    block_tokens: int = 512
    token_ids: tuple[int, int] | None = None

    def check(self, api: Api) -> None:
        """Raises DataError where the parts do not go together, or a file is of no use."""
        if self.dataset in _FROM_FILE and self.path is None:
            raise DataError(f"--dataset {self.dataset} reads a file: name it with --data")
        if self.dataset not in _FROM_FILE and self.path is not None:
            raise DataError(f"--data is read by --dataset sharegpt and file, not by {self.dataset}")
        if self.trace and self.dataset != "random":
            raise DataError("--trace says what the prompts are: it takes no --dataset")
        if self.token_ids is not None and (api == "chat" or self.dataset not in ("random", "shared-prefix")):
            raise DataError(
                "--token-ids are prompts of --api completions, --dataset random or shared-prefix, or --trace"
            )
        if self.path is not None:
            self.open(api, 1.0, 0)

    @property
    def prescribes_lengths(self) -> bool:
        """Whether answers are to be as long as asked for, rather than as the model ends them."""
        return self.dataset in ("random", "shared-prefix")

    @property
    def expects_json(self) -> bool:
        """Whether all answers are to be JSON."""
        return self.dataset == "json-schema"

    def open(self, api: Api, tokens_a_word: float, seed: int) -> Conversations:
        """The conversations; the same seed gives the same ones.

        Raises:
            DataError: A file is of no use, or has messages where texts are asked for.
        """
        maker: PromptMaker = WordMaker(tokens_a_word) if self.token_ids is None else TokenIdMaker(*self.token_ids)
        if self.trace:
            return trace_prompts(list(self.trace), maker, self.block_tokens, seed)
        match self.dataset:
            case "random":
                return synthetic.random_prompts(maker, self.inputs, self.outputs, seed)
            case "shared-prefix":
                return synthetic.shared_prefix(maker, self.groups, self.prefix, self.inputs, self.outputs, seed)
            case "multi-turn":
                return synthetic.multi_turn(maker, self.turns, self.inputs, self.outputs, seed)
            case "json-schema":
                return synthetic.json_schema(self.schema or synthetic.SCHEMA, self.outputs, seed)
        assert self.path is not None, "checked before"
        if self.dataset == "sharegpt":
            return shuffled(read_sharegpt(self.path, self.turns.most, tokens_a_word), seed)
        return shuffled(_texts_only(read_prompts(self.path, self.outputs.most), self.path, api), seed)


def _texts_only(found: Sequence[Conversation], path: Path, api: Api) -> Sequence[Conversation]:
    if api == "completions" and not all(isinstance(each.turns[0].prompt, str) for each in found):
        raise DataError(f"{path} has messages: ask with --api chat")
    return found
