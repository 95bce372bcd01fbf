"""As much of an S3 server as a store of KV pages needs, in memory: PUT, GET and HEAD of whole objects. For tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase, BytesIO
from typing import Any


class ObjectStoreServer(ThreadingHTTPServer):
    """The server, on a free port of this machine. Life cycle: construct, :meth:`start`, :meth:`stop`.

    Attributes:
        objects: What it holds, by ``bucket/key``.
        failing: While set every request is answered 400.
        gates: Keys, as of ``objects``, that are given out only once the event is set.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
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
        if self._key() in self.server.gates:
            self.server.gates[self._key()].wait()
        content = self.server.objects.get(self._key())
        if self.server.failing or content is None:
            self._answer(400 if self.server.failing else 404)
            return
        wanted = self.headers.get("Range")
        if wanted is None:
            self._answer(200, content)
            return
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        part = content[int(first) : int(last) + 1 if last else None]
        span = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
        self._answer(206 if part else 416, part, span=span)

    def do_HEAD(self) -> None:
        content = self.server.objects.get(self._key())
        if self.server.failing or content is None:
            self._answer(400 if self.server.failing else 404)
        else:
            self._answer(200, content, body=False)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 -- its name there
        pass

    def _key(self) -> str:
        return self.path.partition("?")[0].strip("/")

    def _answer(self, status: int, content: bytes = b"", *, body: bool = True, span: str = "") -> None:
        self.send_response(status)
        if span:
            self.send_header("Content-Range", span)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)


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
