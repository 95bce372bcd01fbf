"""A request's grammar in the form that the scheduler takes; one that comes as a bare source is compiled here."""

from __future__ import annotations

from dataclasses import replace

from sapwood.v1 import worker_pb2
from sapwood_common.errors import InvalidArgumentError, UnimplementedError
from sapwood_common.grammar.artefact import ArtefactError, GrammarArtefact
from sapwood_common.grammar.compiler import CompilerLimits, GrammarCompiler
from sapwood_common.grammar.convert import to_grammar
from sapwood_worker.records.model_info import ModelInfo


class RequestGrammars:
    """Reads the grammars of requests. Lives on one event loop.

    Args:
        info: The model.
        limits: Bounds on local compilation.
    """

    def __init__(self, info: ModelInfo, limits: CompilerLimits) -> None:
        self._fingerprint = info.vocabulary_fingerprint
        self._compiler = GrammarCompiler(info.vocabulary_fingerprint, info.special_tokens, limits)

    async def compiled(self, request: worker_pb2.WorkerGenerateRequest, time_remaining: float | None) -> bytes:
        """The serialised artefact of the request's grammar; empty if it has none.

        Args:
            request: The request.
            time_remaining: Seconds to the caller's deadline, if it has one.

        Raises:
            InvalidArgumentError: The grammar or what comes with it is at fault; the field is named.
            DeadlineExceededError: It could not be compiled in time.
            UnimplementedError: This worker has no vocabulary.
        """
        if not request.HasField("grammar"):
            return b""
        if request.sampling.min_tokens:
            raise InvalidArgumentError(
                "sampling.min_tokens cannot be combined with a grammar: where that is complete, only an end may follow",
                field="sampling.min_tokens",
            )
        if request.sampling.ignore_eos:
            raise InvalidArgumentError(
                "sampling.ignore_eos cannot be combined with a grammar: where that is complete, only an end may follow",
                field="sampling.ignore_eos",
            )
        if not self._fingerprint:
            raise UnimplementedError("this worker serves no structured output", field="grammar")
        grammar = to_grammar(request.grammar)
        if not isinstance(grammar, bytes):
            return await self._compiler.compile(replace(grammar, salt=request.cache_salt), time_remaining)
        try:
            artefact = GrammarArtefact.from_bytes(grammar)
        except ArtefactError as error:
            raise InvalidArgumentError(f"grammar.compiled: {error}", field="grammar.compiled") from error
        if artefact.fingerprint != self._fingerprint:
            raise InvalidArgumentError(
                "grammar.compiled is for another vocabulary than this model's", field="grammar.compiled"
            )
        if not artefact.current:  # a tokenizer of another version has compiled it
            return await self._compiler.compile(replace(artefact.source, salt=request.cache_salt), time_remaining)
        return grammar

    async def close(self) -> None:
        """Ends local compilations."""
        await self._compiler.close()
