"""The ``Grammar`` message of the protos to the types used inside."""

from __future__ import annotations

from sapwood.v1 import common_pb2
from sapwood_common.errors import InvalidArgumentError
from sapwood_common.grammar.source import GrammarOptions, GrammarSource


def to_grammar(message: common_pb2.Grammar) -> GrammarSource | bytes:
    """The source, or the serialised artefact where the message carries that.

    Raises:
        InvalidArgumentError: It is empty, or has options next to an artefact.
    """
    kind = message.WhichOneof("grammar")
    options = message.options
    match kind:
        case None:
            raise InvalidArgumentError("grammar is empty", field="grammar")
        case "compiled":
            if message.HasField("options"):
                raise InvalidArgumentError(
                    "grammar.options has no effect on a compiled grammar", field="grammar.options"
                )
            return message.compiled
        case "json_schema":
            text = message.json_schema
        case "regex":
            text = message.regex
        case "ebnf":
            text = message.ebnf
        case "structural_tag":
            text = message.structural_tag
    whitespace = options.any_whitespace if options.HasField("any_whitespace") else True
    return GrammarSource(kind, text, GrammarOptions(whitespace, options.lenient))
