"""An S3 server in memory that does what a store of KV pages or models needs: PUT, GET and HEAD of objects, lists."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase, BytesIO
from typing import Any
from urllib.parse import parse_qs, urlsplit
from xml.sax.saxutils import escape

_MODIFIED = "2026-11-01T00:00:00.000Z"


class ObjectStoreServer(ThreadingHTTPServer):
    """The server, on a free port of this machine. Life cycle: construct, :meth:`start`, :meth:`stop`.

    Attributes:
        objects: What it holds, by ``bucket/key``.
        sent: Bytes of each object that went out.
        failing: While set every request is answered 400.
        gates: Keys, as for ``objects``, that are given out only once the event is set.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.sent: dict[str, int] = {}
        self.failing = False
        self.gates: dict[str, threading.Event] = {}

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def start(self) -> None:
        """Serves in a thread."""
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Ends that."""
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body of an answer in one piece
    server: ObjectStoreServer

    def handle_expect_100(self) -> bool:
        super().handle_expect_100()
        self.wfile.flush()
        return True

    def do_PUT(self) -> None:
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b"".join(_chunks(self.rfile))
        else:
            body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "aws-chunked":
            body = b"".join(_chunks(BytesIO(body)))
        if self.server.failing:
            self._answer(400)
            return
        self.server.objects[self._key()] = body
        self._answer(200)

    def do_GET(self) -> None:
        if "list-type=2" in self.path:
            self._list()
            return
        if self._key() in self.server.gates:
            self.server.gates[self._key()].wait()
        content = self.server.objects.get(self._key())
        if self.server.failing or content is None:
            self._answer(400 if self.server.failing else 404)
            return
        wanted = self.headers.get("Range")
        if wanted is None:
            self._count(content)
            self._answer(200, content, tag=_tag(content))
            return
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        part = content[int(first) : int(last) + 1 if last else None]
        span = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
        self._count(part)
        self._answer(206 if part else 416, part, span=span, tag=_tag(content))

    def do_HEAD(self) -> None:
        content = self.server.objects.get(self._key())
        if self.server.failing or content is None:
            self._answer(400 if self.server.failing else 404)
        else:
            self._answer(200, content, body=False, tag=_tag(content))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 -- its name there
        pass

    def _list(self) -> None:
        """Answers ListObjectsV2, all keys in one page."""
        if self.server.failing:
            self._answer(400)
            return
        query = parse_qs(urlsplit(self.path).query)
        prefix, delimiter = (query.get(name, [""])[0] for name in ("prefix", "delimiter"))
        bucket = f"{self._key()}/"
        contents, folders = "", set()
        for key, content in sorted(self.server.objects.items()):
            if not key.startswith(bucket + prefix):
                continue
            folder, found, _ = key.removeprefix(bucket + prefix).partition(delimiter) if delimiter else ("", "", "")
            if found:
                folders.add(f"{prefix}{folder}{delimiter}")
                continue
            contents += (
                f"<Contents><Key>{escape(key.removeprefix(bucket))}</Key><LastModified>{_MODIFIED}</LastModified>"
                f"<ETag>{_tag(content)}</ETag><Size>{len(content)}</Size></Contents>"
            )
        shared = "".join(f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in folders)
        answer = f"<ListBucketResult><IsTruncated>false</IsTruncated>{contents}{shared}</ListBucketResult>"
        self._answer(200, answer.encode())

    def _count(self, content: bytes) -> None:
        self.server.sent[self._key()] = self.server.sent.get(self._key(), 0) + len(content)

    def _key(self) -> str:
        return self.path.partition("?")[0].strip("/")

    def _answer(self, status: int, content: bytes = b"", *, body: bool = True, span: str = "", tag: str = "") -> None:
        self.send_response(status)
        if tag:
            self.send_header("ETag", tag)
            self.send_header("Last-Modified", "Sun, 01 Nov 2026 00:00:00 GMT")
        if span:
            self.send_header("Content-Range", span)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)


def _tag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'


def _chunks(source: BufferedIOBase) -> Iterator[bytes]:
    """The content of a body in chunks: a line with a chunk's size in hexadecimal, the chunk, an empty line; the last is empty."""
    while True:
        size = int(source.readline().partition(b";")[0], 16)
        if size == 0:
            break
        yield source.read(size)
        source.readline()
    while source.readline().strip():  # what follows the last: checksums, an empty line
        pass
