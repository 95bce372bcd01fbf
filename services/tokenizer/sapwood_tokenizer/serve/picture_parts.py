"""The pictures in requests for conversations, and in their answers."""

from __future__ import annotations

from collections.abc import Iterable

from sapwood.v1 import common_pb2, tokenizer_pb2
from sapwood_common.errors import InvalidArgumentError
from sapwood_tokenizer.pictures.preparer import Placed, Source


def sources_of(request: tokenizer_pb2.ApplyChatTemplateRequest) -> list[Source]:
    """The pictures of a conversation, in order.

    Raises:
        InvalidArgumentError: A part is neither text nor picture, or a picture has no source.
    """
    found = []
    for index, message in enumerate(request.messages):
        for place, item in enumerate(message.items):
            field = f"messages[{index}].items[{place}]"
            kind = item.WhichOneof("part")
            if kind is None:
                raise InvalidArgumentError("a part is text, a picture or a video", field=field)
            if kind == "picture":
                found.append(_source(item.picture, field))
    return found


def sources_of_text(request: tokenizer_pb2.TokenizeRequest) -> list[Source]:
    """The pictures of a text.

    Raises:
        InvalidArgumentError: They are not of one text alone, or a picture has no source.
    """
    if request.pictures and (len(request.texts) != 1 or request.suffix or request.return_offsets):
        raise InvalidArgumentError("pictures go with one text, without suffix or offsets", field="pictures")
    return [_source(each, f"pictures[{index}]") for index, each in enumerate(request.pictures)]


def _source(picture: common_pb2.PictureSource, field: str) -> Source:
    kind = picture.WhichOneof("source")
    if kind is None:
        raise InvalidArgumentError("a picture has a url or data", field=field)
    return Source(picture.url if kind == "url" else picture.data, picture.detail, field, picture.video)


def without_pictures(request: tokenizer_pb2.ApplyChatTemplateRequest) -> tokenizer_pb2.ApplyChatTemplateRequest:
    """The request without what its pictures show: enough to render it."""
    bare = tokenizer_pb2.ApplyChatTemplateRequest(
        tools=request.tools,
        template_variables=request.template_variables,
        continue_final_message=request.continue_final_message,
        cache_salt=request.cache_salt,
    )
    for message in request.messages:
        added = bare.messages.add()
        if not message.items:
            added.CopyFrom(message)
            continue
        items = [
            common_pb2.ContentPart(picture=common_pb2.PictureSource(video=item.picture.video))
            if item.HasField("picture")
            else item
            for item in message.items
        ]
        added.role = message.role
        added.items.extend(items)
        added.tool_calls.extend(message.tool_calls)
        for name in ("name", "tool_call_id", "reasoning"):
            if message.HasField(name):
                setattr(added, name, getattr(message, name))
    return bare


def add_pictures(
    response: tokenizer_pb2.ApplyChatTemplateResponse | tokenizer_pb2.TokenizeResponse, placed: Iterable[Placed]
) -> None:
    """Adds prepared pictures to an answer."""
    for each in placed:
        tiles, height, width = each.picture.shape
        response.pictures.add(
            offset=each.span.offset,
            length=each.span.length,
            digest=each.span.digest,
            tiles=tiles,
            height=height,
            width=width,
            layout=each.picture.layout,
            pixels=each.picture.pixels,
        )
