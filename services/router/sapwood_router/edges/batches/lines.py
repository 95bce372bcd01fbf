"""Lines of a batch's input: each is checked before any is run, and read again to be run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from sapwood_common.errors import InvalidArgumentError, SapwoodError
from sapwood_net.pacing.heavy_work import HeavyWork
from sapwood_router.edges.batches.records import LineProblem
from sapwood_router.edges.files.store import FileStore
from sapwood_router.edges.http.json_body import make_whole
from sapwood_router.edges.http.json_size import check_size
from sapwood_router.edges.routes import Post

_MOST_PROBLEMS = 50
"""Problems of one file that are shown."""
_LONGEST_ID = 512
_CHECKED_AT_ONCE = 64


class Line(msgspec.Struct):
    """A line."""

    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


_DECODER = msgspec.json.Decoder(Line)


def read_line(line: bytes) -> Line:
    """A line that was checked."""
    return _DECODER.decode(line)


async def check_lines(
    files: FileStore,
    tenant: str,
    file_id: str,
    endpoint: str,
    routes: Mapping[str, Post],
    heavy: HeavyWork,
    *,
    most: int,
    longest: int,
) -> tuple[int, list[LineProblem]]:
    """Looks through all lines of a file.

    Args:
        files: Has the file.
        tenant: Whose it is.
        file_id: Which.
        endpoint: The path that all lines must name.
        routes: Who answers a path.
        heavy: Others have turns meanwhile.
        most: Lines that there may be.
        longest: Bytes of a line.

    Returns:
        How many there are, and what is wrong with them.
    """
    problems: list[LineProblem] = []
    seen: set[bytes] = set()
    count = 0
    stint = heavy.stint(tenant)
    try:
        async for number, line in files.lines(tenant, file_id, longest):
            count += 1
            if count > most:
                problems.append(LineProblem("too_many_lines", f"a batch may have {most} lines", number))
                break
            if (problem := _problem(line, number, endpoint, routes[endpoint], seen, longest)) is not None:
                problems.append(problem)
                if len(problems) >= _MOST_PROBLEMS:
                    break
            if not count % _CHECKED_AT_ONCE:
                await stint.pause()
    except InvalidArgumentError as error:
        problems.append(LineProblem("line_too_long", error.message))
    if not count:
        problems.append(LineProblem("empty_file", "the file has no lines"))
    return count, problems


def _problem(
    line: bytes, number: int, endpoint: str, route: Post, seen: set[bytes], longest: int
) -> LineProblem | None:
    if len(line) > longest:
        return LineProblem("line_too_long", f"a line may have {longest} bytes", number)
    try:
        check_size(line)
        found = _DECODER.decode(line)
        found.custom_id.encode()
    except SapwoodError as error:
        return LineProblem("invalid_line", error.message, number)
    except msgspec.ValidationError as error:
        return LineProblem("invalid_line", _without_root(error), number)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        return LineProblem("invalid_json_line", f"it is not valid JSON: {error}", number)
    if found.method != "POST":
        return LineProblem("invalid_method", "method must be POST", number, "method")
    if found.url != endpoint:
        return LineProblem("mismatched_url", f"url must be {endpoint}, as the batch says", number, "url")
    if not 1 <= len(found.custom_id) <= _LONGEST_ID:
        return LineProblem(
            "invalid_custom_id", f"custom_id must have 1 to {_LONGEST_ID} characters", number, "custom_id"
        )
    digest = hashlib.blake2b(found.custom_id.encode(), digest_size=16).digest()
    if digest in seen:
        return LineProblem("duplicate_custom_id", "another line has this custom_id", number, "custom_id")
    seen.add(digest)
    if found.body.get("stream"):
        return LineProblem("invalid_body", "a line's answer is not streamed", number, "body.stream")
    if found.body.get("background"):
        return LineProblem(
            "invalid_body", "a line's answer is made in the background anyway", number, "body.background"
        )
    return _body_problem(found.body, route, number)


def _body_problem(body: dict[str, Any], route: Post, number: int) -> LineProblem | None:
    """Whether the body's known fields have their types: the rest is found when it is run."""
    (cls,) = route.takes
    known = {name: value for name, value in body.items() if name in cls.__struct_fields__ and value is not None}
    make_whole(known, cls)
    try:
        msgspec.convert(known, cls)
    except msgspec.ValidationError as error:
        return LineProblem("invalid_body", _without_root(error), number, "body")
    return None


def _without_root(error: Exception) -> str:
    return str(error).replace("`$.", "`")
