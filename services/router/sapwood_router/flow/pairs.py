"""Pairs of texts become sequences of tokens, as the model's tokenizer joins them; a text of many pairs is encoded once."""

from __future__ import annotations

from collections.abc import Sequence

from sapwood_common.errors import InvalidArgumentError
from sapwood_router.request.embed_request import EmbedRequest, TextPair
from sapwood_router.tokenizer.client import TokenizerClient


async def encode_pairs(client: TokenizerClient, pairs: Sequence[TextPair], request: EmbedRequest) -> list[list[int]]:
    """The tokens of each pair. What looks like a special token in a text is text: such tokens tell where a text ends.

    Args:
        client: The model's tokenizer.
        pairs: The request's.
        request: Whose they are.

    Raises:
        InvalidArgumentError: The tokenizer joins no pairs.
        SapwoodError: As the tokenizer answers.
    """
    template = (await client.info(request.request_id, request.deadline)).pair
    if template is None:
        raise InvalidArgumentError("the model's tokenizer does not say how two texts are joined", field="model")
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    salt = request.caller.cache_salt
    encoded = await client.encode_texts(texts, request.request_id, request.deadline, salt, bare=True)
    tokens = dict(zip(texts, encoded, strict=True))
    return [
        [*template.before, *tokens[pair.first], *template.between, *tokens[pair.second], *template.after]
        for pair in pairs
    ]
