"""``/v1/files``. Uploads are ``multipart/form-data``, and go to the store as they come."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import msgspec
import python_multipart

from sapwood_common.errors import InvalidArgumentError, SapwoodError
from sapwood_router.edges.files.store import FileObject, FileStore, FileWriter
from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.http.listing import no_item, page_body, page_query
from sapwood_router.edges.http1.errors import HttpError
from sapwood_router.edges.routes import Ask, Route

PATH = "/v1/files"
_BELOW = f"{PATH}/"
_CONTENT = "content"
_PURPOSES = ("batch", "user_data", "assistants", "fine-tune", "vision", "evals")
_MOST_DROPPED = 32 * 1024 * 1024
_LONGEST_FIELD = 1024
_MOST_PARTS = 32
_MOST_LISTED = 10_000
_LEAST_SECONDS, _MOST_SECONDS = 3600, 2_592_000


class DeletedFile(msgspec.Struct):
    """A file that was forgotten."""

    id: str
    object: str = "file"
    deleted: bool = True


class FilesApi:
    """The paths.

    Args:
        files: Has the files.
    """

    def __init__(self, files: FileStore) -> None:
        self._files = files

    def routes(self) -> list[Route]:
        """The routes."""
        return [
            Ask(PATH, self.create, method="POST", summary="Keeps a file (multipart/form-data)", gives=FileObject),
            Ask(PATH, self.list, summary="Lists the files that are kept"),
            Ask(_BELOW, self.show, summary="ID: shows a file; ID/content: gives it out"),
            Ask(_BELOW, self.delete, method="DELETE", summary="ID: forgets a file", gives=DeletedFile),
        ]

    async def create(self, exchange: Exchange) -> None:
        """Keeps a file. Fields that come before it say its purpose; those after it are checked, too.

        Raises:
            SapwoodError: The form is wrong, or there is no room.
        """
        form = _Form(_boundary(exchange))
        writer: FileWriter | None = None
        try:
            async for piece in exchange.pieces():
                form.feed(piece)
                if writer is None and form.filename is not None:
                    writer = await self._files.begin(exchange.tenant, form.filename, "")
                if writer is not None and (content := form.take()):
                    await writer.write(content)
            if writer is None or not form.ended:
                raise InvalidArgumentError("file is required, as a part with a file name", field="file")
            writer.describe(form.purpose(), form.expires_at())
            made = await writer.finish()
        except BaseException as error:
            if writer is not None:
                await writer.discard()
            if isinstance(error, SapwoodError):
                await _drop_rest(exchange)
            raise
        await exchange.send_body(200, msgspec.json.encode(made))

    async def list(self, exchange: Exchange) -> None:
        """Lists files.

        Raises:
            SapwoodError: The query makes no sense, or names a file that there is not.
        """
        asked = page_query(exchange.query, usual=_MOST_LISTED, most=_MOST_LISTED)
        found = await self._files.page(
            exchange.tenant,
            asked.limit + 1,
            newest_first=asked.newest_first,
            after=asked.after,
            purpose=exchange.query.get("purpose"),
        )
        if found is None:
            raise no_item(asked.after or "")
        page = [msgspec.to_builtins(each) for each in found[: asked.limit]]
        await exchange.send_body(200, page_body(page, more=len(found) > asked.limit))

    async def show(self, exchange: Exchange) -> None:
        """Shows a file, or gives its content out.

        Raises:
            NotFoundError: There is none.
        """
        file_id, below = _names_in(exchange.path)
        found = await self._files.get(exchange.tenant, file_id)
        if not below:
            await exchange.send_body(200, msgspec.json.encode(found))
            return
        headers = [(b"content-type", b"application/octet-stream"), (b"x-content-type-options", b"nosniff")]
        await exchange.send_pieces(headers, self._files.read(exchange.tenant, file_id))

    async def delete(self, exchange: Exchange) -> None:
        """Forgets a file.

        Raises:
            NotFoundError: There is none.
        """
        file_id, below = _names_in(exchange.path)
        if below:
            raise HttpError(404, f"{exchange.path} takes no DELETE")
        await self._files.delete(exchange.tenant, file_id)
        await exchange.send_body(200, msgspec.json.encode(DeletedFile(file_id)))


async def _drop_rest(exchange: Exchange) -> None:
    """Reads on after a refusal, as far as that is little: many clients read no answer before they have sent all."""
    dropped = 0
    with suppress(SapwoodError):
        async for piece in exchange.pieces():
            dropped += len(piece)
            if dropped > _MOST_DROPPED:
                return


def _names_in(path: str) -> tuple[str, str]:
    """The id in a path, and ``content`` or "". Raises HttpError for other paths."""
    file_id, _, below = path.removeprefix(_BELOW).partition("/")
    if not file_id or below not in ("", _CONTENT):
        raise HttpError(404, f"there is no {path}")
    return file_id, below


def _boundary(exchange: Exchange) -> bytes:
    kind, options = python_multipart.multipart.parse_options_header(exchange.headers.get(b"content-type", b""))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise HttpError(415, "a file comes as multipart/form-data with a boundary", field="content-type")
    return options[b"boundary"]


class _Form:
    """Reads a form: small fields whole, the content of the part ``file`` as it comes.

    Attributes:
        filename: The file's name, once its part has begun.
        ended: Whether the form has come to its end.
    """

    def __init__(self, boundary: bytes) -> None:
        self.filename: str | None = None
        self.ended = False
        self._fields: dict[str, bytearray] = {}
        self._content = bytearray()
        self._parts = 0
        self._name = ""
        self._header = b""
        self._value = b""
        callbacks: dict[str, Callable[..., None]] = {
            "on_part_begin": self._begin,
            "on_header_field": self._add_header,
            "on_header_value": self._add_value,
            "on_header_end": self._end_header,
            "on_part_data": self._add_data,
            "on_end": self._end,
        }
        try:
            self._parser = python_multipart.MultipartParser(boundary, callbacks)  # type: ignore[arg-type]
        except python_multipart.exceptions.FormParserError as error:
            raise InvalidArgumentError(str(error)[:200], field="content-type") from error

    def feed(self, data: bytes) -> None:
        """Reads some more.

        Raises:
            InvalidArgumentError: It is malformed, or a field is too long.
        """
        try:
            self._parser.write(data)
        except python_multipart.exceptions.MultipartParseError as error:
            raise InvalidArgumentError(f"the form is malformed: {str(error)[:200]}") from error

    def take(self) -> bytes:
        """The file's content since the last time."""
        content = bytes(self._content)
        self._content.clear()
        return content

    def purpose(self) -> str:
        """The field ``purpose``. Raises InvalidArgumentError where it makes no sense."""
        purpose = self._field("purpose")
        if purpose not in _PURPOSES:
            raise InvalidArgumentError(f"purpose must be one of {', '.join(_PURPOSES)}", field="purpose")
        return purpose

    def expires_at(self) -> int | None:
        """When the file goes, in seconds since 1970; None: it stays. Raises InvalidArgumentError where that makes no sense."""
        seconds, anchor = (self._field(f"expires_after[{part}]") for part in ("seconds", "anchor"))
        if not seconds and not anchor:
            return None
        if anchor != "created_at":
            raise InvalidArgumentError("expires_after.anchor must be created_at", field="expires_after.anchor")
        number = int(seconds) if seconds.isascii() and seconds.isdigit() and len(seconds) <= 9 else 0
        if not _LEAST_SECONDS <= number <= _MOST_SECONDS:
            raise InvalidArgumentError(
                f"expires_after.seconds must be in {_LEAST_SECONDS}..{_MOST_SECONDS}", field="expires_after.seconds"
            )
        return int(time.time()) + number

    def _field(self, name: str) -> str:
        return self._fields.get(name, b"").decode("utf-8", "replace")

    def _begin(self) -> None:
        self._name = ""
        self._parts += 1
        if self._parts > _MOST_PARTS:
            raise InvalidArgumentError(f"the form has more than {_MOST_PARTS} parts")

    def _add_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]
        self._check_header()

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]
        self._check_header()

    def _check_header(self) -> None:
        if len(self._header) + len(self._value) > _LONGEST_FIELD:
            raise InvalidArgumentError("a header of the form is too long")

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = python_multipart.multipart.parse_options_header(self._value)
            self._name = options.get(b"name", b"").decode("utf-8", "replace")
            if self._name == "file" and b"filename" in options:
                if self.filename is not None:
                    raise InvalidArgumentError("there may be one file only", field="file")
                self.filename = options[b"filename"].decode("utf-8", "replace")
        self._header = self._value = b""

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file" and self.filename is not None:
            self._content += data[start:end]
            return
        field = self._fields.setdefault(self._name, bytearray())
        field += data[start:end]
        if len(field) > _LONGEST_FIELD:
            raise InvalidArgumentError(f"{self._name[:100]} is too long", field=self._name[:100])

    def _end(self) -> None:
        self.ended = True
