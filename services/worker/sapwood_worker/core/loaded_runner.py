"""A runner that has loaded its model, as the scheduler process knows it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

from sapwood_common.grammar.vocabulary import TokenVocabulary
from sapwood_worker.core.tiering import TieredRunner
from sapwood_worker.records.lora import Lora, LoraFacts
from sapwood_worker.records.model_info import ModelInfo
from sapwood_worker.records.pictures import Picture, PictureUse
from sapwood_worker.records.step import Runner
from sapwood_worker.records.weights import Memory, TrainerGroup, WeightBucket, WeightsFacts


class DraftRunner(Runner, Protocol):
    """A runner of a draft model.

    Attributes:
        info: Facts about it.
    """

    info: ModelInfo


class LoadedRunner(TieredRunner, Protocol):
    """A runner that knows its model.

    Attributes:
        info: Facts about it.
        vocabulary: Its tokens, where its files hold them and structured output is wanted.
        experts: Asks how many tokens each expert of each layer has got so far: on rank 0 of a group of all layers, else of those
            that this rank has. What it returns waits for the answer. None: the model has none.
        sums: Tells how often each method has summed tensors over the ranks of a layer; None: there is one rank.
        check_pictures: Raises InvalidArgumentError unless the model can use these pictures at the tokens of a prompt; None: it
            takes none.
        picture_use: Tells what became of pictures so far; None: it takes none.
    """

    info: ModelInfo
    vocabulary: TokenVocabulary | None
    experts: Callable[[], Callable[[], list[list[int]]]] | None
    sums: Callable[[], dict[str, int]] | None
    check_pictures: Callable[[Sequence[Picture], array[int]], None] | None
    picture_use: Callable[[], PictureUse] | None

    def exchanged_bytes(self, tokens: int) -> int:
        """Bytes of rows and of their experts' sums that ranks with whole experts have given each other since the start.

        Args:
            tokens: How many tokens all experts of all layers had got at that time.
        """
        ...

    def read_lora(self, lora: Lora) -> LoraFacts:
        """Reads an adapter into the host's memory, on all ranks or on none. Blocks for as long as that takes: call it in a thread
        beside the steps. Several may be read at once.

        Raises:
            InvalidArgumentError: The adapter is damaged, is for another model, or asks for something that is not served; names
                the file, and the tensor and the module.
            UnimplementedError: This model serves no adapters, as nobody asked for slots or it takes none.
            ResourceExhaustedError: There is no memory for it.
        """
        ...

    def drop_lora(self, number: int) -> None:
        """Forgets an adapter that was read. The caller promises that no slot holds it for a request, and puts it in none again.
        Call it in the thread that launches steps."""
        ...

    def stage_weights(self, bucket: WeightBucket) -> WeightsFacts:
        """Reads tensors of an update beside the weights in use, on all ranks or on none. Blocks for as long as that takes: call
        it in a thread beside the steps, one call at a time. If it fails, the update is dropped.

        Raises:
            InvalidArgumentError: A tensor is unknown, of another shape, or damaged; names it.
            UnimplementedError: The model has weights that cannot be changed; names one.
            ResourceExhaustedError: There is no memory for it.
        """
        ...

    def ready_weights(self, update: int, *, partial: bool) -> WeightsFacts:
        """Checks that an update is complete and readies it, on all ranks or on none; called as :meth:`stage_weights` is.

        Args:
            update: Its number.
            partial: Whether tensors that were not staged stay as they are; else all of the model's are needed.

        Raises:
            InvalidArgumentError: Tensors are missing; names them.
            ResourceExhaustedError: There is no memory for it.
        """
        ...

    def exchange_weights(self, update: int, *, keep: bool) -> bytes:
        """Has the model compute with an update that is ready; 0: with the weights that the last exchange kept. Call it in the
        thread that launches steps, when all have been computed.

        Args:
            update: The update's number, or 0.
            keep: Whether to keep the present weights, so that they can be exchanged back.

        Returns:
            16 bytes that stand for the weights; empty: they are those of the start.
        """
        ...

    def drop_weights(self, update: int) -> None:
        """Forgets what is staged of an update; nothing happens if nothing is."""
        ...

    def join_group(self, group: TrainerGroup) -> None:
        """Joins a group that a trainer leads, on all ranks; called as :meth:`stage_weights` is.

        Raises:
            InvalidArgumentError: It does not come to stand; says why.
        """
        ...

    def leave_group(self, name: str) -> bool:
        """Leaves a group, on all ranks; returns whether they were in it."""
        ...

    def release_memory(self, memory: Sequence[Memory], folder: str) -> int:
        """Gives memory back until :meth:`restore_memory`, on all ranks. Call it in the thread that launches steps, when all have
        been computed and no page is in use.

        Args:
            memory: Which.
            folder: Keeps the weights meanwhile.

        Returns:
            Bytes of this rank.

        Raises:
            UnimplementedError: It cannot be given back on this device, or in this format.
        """
        ...

    def restore_memory(self, memory: Sequence[Memory], folder: str) -> None:
        """Undoes :meth:`release_memory`; pages hold nothing then. Raises OSError if the weights are not there."""
        ...

    @property
    def draft(self) -> DraftRunner | None:
        """Runs the draft model, with the same number of pages; None: there is no draft model."""
        ...
