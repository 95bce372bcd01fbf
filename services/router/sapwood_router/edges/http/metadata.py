"""What clients attach to what is kept for them, with OpenAI's bounds."""

from __future__ import annotations

from sapwood_common.errors import InvalidArgumentError

_MOST, _LONGEST_KEY, _LONGEST_VALUE = 16, 64, 512


def checked_metadata(given: dict[str, str] | None) -> dict[str, str]:
    """The metadata of a request.

    Raises:
        InvalidArgumentError: There are more than 16 entries, or one has more than 64 characters as a key, 512 as a value.
    """
    metadata = given or {}
    if len(metadata) > _MOST:
        raise InvalidArgumentError(f"metadata may have at most {_MOST} entries", field="metadata")
    for key, value in metadata.items():
        if len(key) > _LONGEST_KEY or len(value) > _LONGEST_VALUE:
            raise InvalidArgumentError(
                f"metadata: a key has at most {_LONGEST_KEY} characters, a value {_LONGEST_VALUE}", field="metadata"
            )
    return metadata
