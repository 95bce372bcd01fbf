"""A model in a program, without a server that anybody else could reach."""

from __future__ import annotations

import weakref
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, Self, TextIO, TypeVar, Unpack, overload

from sapwood.client import Client, Generation
from sapwood.embedded.batches import Batches, Score, is_one
from sapwood.embedded.private_cluster import PrivateCluster
from sapwood.embedding import Embeddings, EmbedOptions
from sapwood.errors import UnavailableError
from sapwood.generation import Answer, Options

ResultT = TypeVar("ResultT")
Message = Mapping[str, Any]


class Engine:
    """A model and all it needs, as child processes of this program: a ``with`` block, or :meth:`start` and :meth:`close`.

        with sapwood.Engine("demo") as engine:
            answers = engine.generate(["The capital of France is", "Once upon a time"], max_tokens=16)

    They listen on Unix sockets in a folder of their own, on no port, and end with this process, however it ends. What is one
    gives one result, a list a list: prompts of one call are batched. Safe to share between threads; several engines may run.

    Args:
        model: ``demo``, or what ``sapwood up --model`` takes.
        workers: How many workers share the requests, each with a model of its own.
        timeout: Seconds that each request may take; None for no limit.
        logs: Gets the services' log lines; None: the lines are dropped.
        options: Settings of the services by their names (docs/configuration.md): ``max_running=8``; with a service's name before
            it of that one only: ``router_log_level="debug"``.

    Raises:
        InvalidArgumentError: An option is wrong; ``field`` names it.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        workers: int = 1,
        timeout: float | None = None,
        logs: TextIO | None = None,
        **options: Any,
    ) -> None:
        self._cluster = PrivateCluster(model, workers, options, logs)
        self._timeout = timeout
        self._stream: Client | None = None
        self._batches: Batches | None = None
        self._end = weakref.finalize(self, self._cluster.close)  # also at the program's end

    def start(self) -> Self:
        """Loads the model; returns once it answers, at once where it does.

        Raises:
            InvalidArgumentError: There is no such model.
            UnavailableError: A part ended meanwhile; the message has its last lines. Or the engine was closed before.
        """
        if self._batches is not None:
            return self
        try:
            places = self._cluster.start()

            async def connect() -> Batches:
                return self._cluster.connect(places, self._timeout)

            self._batches = self._cluster.background.wait(connect())
            self._stream = Client(places.grpc, timeout=self._timeout)
        except BaseException:
            self._end()
            raise
        return self

    def close(self) -> None:
        """Stops everything; calls that other threads wait for end with CancelledError. May be called again."""
        batches, self._batches = self._batches, None
        stream, self._stream = self._stream, None
        try:
            if stream is not None:
                stream.close()
            if batches is not None:
                self._cluster.background.wait(batches.close())
        except UnavailableError:  # it has ended by itself
            pass
        finally:
            self._end()

    @overload
    def generate(self, prompts: str | Sequence[int], **options: Unpack[Options]) -> Answer: ...

    @overload
    def generate(self, prompts: list[str] | list[list[int]], **options: Unpack[Options]) -> list[Answer]: ...

    def generate(self, prompts: Any, **options: Unpack[Options]) -> Any:
        """Continues a prompt, or each of a list of them, all at a time as far as there is room.

        Args:
            prompts: A text, token ids, or a list of either.
            options: The fields of :class:`~sapwood.generation.Options`, for all prompts. ``n`` goes with a list: each prompt then
                has this many answers, one after the other.

        Raises:
            SapwoodError: A prompt failed; in a list the message says which, and the others are cancelled.
            ValueError, TypeError: As for :meth:`sapwood.client.Client.generate`.
        """
        if is_one(prompts):
            return self._wait(self._asked.generate([prompts], one_of(options)))[0]
        return self._wait(self._asked.generate([*prompts], options))

    @overload
    def chat(self, messages: Sequence[Message], **options: Unpack[Options]) -> Answer: ...

    @overload
    def chat(self, messages: list[list[Message]], **options: Unpack[Options]) -> list[Answer]: ...

    def chat(self, messages: Any, **options: Unpack[Options]) -> Any:
        """Answers a conversation, or each of a list of them, as :meth:`generate` does; ``tools`` and ``json_schema`` are options.

        Args:
            messages: Mappings with ``role`` and ``content``, or a list of such conversations.
            options: The fields of :class:`~sapwood.generation.Options`.
        """
        if is_one(messages):
            return self._wait(self._asked.chat([messages], one_of(options)))[0]
        return self._wait(self._asked.chat([*messages], options))

    def stream(
        self,
        text: str | None = None,
        *,
        messages: Iterable[Message] | None = None,
        token_ids: Iterable[int] | None = None,
        **options: Unpack[Options],
    ) -> Generation:
        """Starts a generation and returns at once: iterate over it for the deltas; leaving its ``with`` block stops it.

        Takes and raises what :meth:`sapwood.client.Client.generate` does.
        """
        self._cluster.background.check()
        assert self._stream is not None
        return self._stream.generate(text, messages=messages, token_ids=token_ids, **options)

    def embed(self, inputs: str | Sequence[str | Sequence[int]], **options: Unpack[EmbedOptions]) -> Embeddings:
        """The vectors of a text, or of any number of texts and token sequences, as :meth:`sapwood.client.Client.embed`."""
        given = [inputs] if isinstance(inputs, str) else [*inputs]
        return self._wait(self._asked.embed(given, options))

    def score(self, pairs: Iterable[tuple[str | Sequence[int], str | Sequence[int]]]) -> list[Score]:
        """How likely each continuation is after its prompt.

        Args:
            pairs: Prompt and continuation, as texts or token ids. Two texts are tokenized together: the continuation's are the
                tokens from the first that the prompt by itself does not have.

        Raises:
            ValueError: A prompt has no token, or a continuation adds none.
            SapwoodError: A pair failed, which the message names.
        """
        return self._wait(self._asked.score([*pairs]))

    @overload
    def tokenize(self, texts: str, *, special: bool = True) -> list[int]: ...

    @overload
    def tokenize(self, texts: list[str], *, special: bool = True) -> list[list[int]]: ...

    def tokenize(self, texts: Any, *, special: bool = True) -> Any:
        """The token ids of a text, or of each of a list; ``special``: with the model's own around them, such as BOS."""
        if isinstance(texts, str):
            return self._wait(self._asked.tokenize([texts], special=special))[0]
        return self._wait(self._asked.tokenize(texts, special=special))

    @overload
    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    @overload
    def detokenize(self, token_ids: list[list[int]], *, skip_special_tokens: bool = True) -> list[str]: ...

    def detokenize(self, token_ids: Any, *, skip_special_tokens: bool = True) -> Any:
        """The text of token ids, or of each of a list of them."""
        if is_one(token_ids):
            return self._wait(self._asked.detokenize([token_ids], skip_special_tokens=skip_special_tokens))[0]
        return self._wait(self._asked.detokenize(token_ids, skip_special_tokens=skip_special_tokens))

    @property
    def address(self) -> str:
        """Where its router listens: a Unix socket. Raises UnavailableError if it does not run."""
        return self._asked.client.address

    @property
    def _asked(self) -> Batches:
        self._cluster.background.check()
        assert self._batches is not None
        return self._batches

    def _wait(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        return self._cluster.background.wait(work)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()


def one_of(options: Options) -> Options:
    """Options of a single prompt. Raises ValueError if they ask for several answers."""
    if options.get("n", 1) != 1:
        raise ValueError("n goes with a list of prompts: [prompt]")
    return options
