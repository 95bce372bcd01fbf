"""Finds which field of a message that would not parse is at fault, so that the error can name it.

protobuf's parser only says "Error parsing message". :func:`find_invalid_utf8` walks the wire format beside the descriptor, in one
pass, O(bytes), and finds the first string field that is not UTF-8. It is called only after a parse has failed.
"""

from __future__ import annotations

from google.protobuf.descriptor import Descriptor, FieldDescriptor

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


def find_invalid_utf8(raw: bytes, descriptor: Descriptor, prefix: str = "") -> str | None:
    """The dotted path of the first string field whose bytes are not UTF-8, or None (then the bytes are no message)."""
    offset = 0
    try:
        while offset < len(raw):
            tag, offset = _varint(raw, offset)
            field = descriptor.fields_by_number.get(tag >> 3)
            kind = tag & 7
            if kind == _LENGTH:
                size, offset = _varint(raw, offset)
                body = raw[offset : offset + size]
                offset += size
                found = _check(body, field, prefix) if field is not None else None
                if found is not None:
                    return found
            elif kind == _VARINT:
                _, offset = _varint(raw, offset)
            elif kind in (_FIXED64, _FIXED32):
                offset += 8 if kind == _FIXED64 else 4
            else:
                return None
    except IndexError:
        return None
    return None


def _check(body: bytes, field: FieldDescriptor, prefix: str) -> str | None:
    path = f"{prefix}{field.name}"
    if field.type == FieldDescriptor.TYPE_STRING:
        try:
            body.decode("utf-8")
        except UnicodeDecodeError:
            return path
    elif field.type == FieldDescriptor.TYPE_MESSAGE and field.message_type is not None:
        return find_invalid_utf8(body, field.message_type, f"{path}.")
    return None


def _varint(raw: bytes, offset: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, offset
        shift += 7
