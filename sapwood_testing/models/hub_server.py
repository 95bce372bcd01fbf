"""A Hugging Face hub on this machine: as much of its HTTP protocol as fetching models takes. For tests.

A repository has one history of commits, each a set of files. Weights (``.safetensors``, ``.gguf``) are kept apart, as on the hub:
``/resolve/`` redirects to a place that answers ranges.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

_LARGE = (".safetensors", ".gguf", ".bin")


@dataclass
class Repo:
    """A repository.

    Attributes:
        commits: The files of each commit.
        refs: The commit of each branch and tag.
        private: Whether only who has a token knows of it.
        gated: Whether its weights are given only to ``admitted``.
        admitted: Tokens that get them.
        claimed: Sizes that learn of files in place of their own.
    """

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False
    admitted: set[str] = field(default_factory=set)
    claimed: dict[str, int] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes], ref: str = "main") -> str:
        """Adds a commit, which a branch or tag names from now on; returns its id."""
        number = hashlib.sha1(repr((len(self.commits), sorted(files))).encode()).hexdigest()
        self.commits[number] = files
        self.refs[ref] = number
        return number

    def files(self, ref: str = "main") -> dict[str, bytes]:
        """The files of a branch or tag."""
        return self.commits[self.refs[ref]]


@dataclass(frozen=True)
class Request:
    """A request as it came.

    Attributes:
        method: ``GET`` or ``HEAD``.
        path: With its query.
        range: Of the bytes asked for, as in the header; empty: all.
        token: The bearer's token, if there was one.
        through_proxy: Whether it was sent as to a proxy.
    """

    method: str
    path: str
    range: str
    token: str
    through_proxy: bool


class HubServer(ThreadingHTTPServer):
    """The server, on a free port of this machine. Life cycle: construct, :meth:`start`, :meth:`stop`.

    Attributes:
        repos: By ``owner/name``.
        tokens: Tokens that it knows.
        requests: What it was asked.
        sent: Bytes of large files that went out, by the file's sha256.
        cuts: After so many bytes of an answer with a large file the connection breaks; one entry an answer, then none.
        gate: Large files are given out only once it is set.
        lost: Large files, by sha256, for which 500 is answered.
        answers: While it is not set, questions about repositories wait for it.
        failing: While set, every request is answered with this status.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, Repo] = {}
        self.tokens: set[str] = set()
        self.requests: list[Request] = []
        self._changed = threading.Condition()
        self.sent: dict[str, int] = {}
        self.cuts: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.lost: set[str] = set()
        self.answers = threading.Event()
        self.answers.set()
        self.failing: int | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def sent_bytes(self) -> int:
        """Bytes of large files that went out, of all together."""
        return sum(self.sent.values())

    def asked(self, method: str, part: str) -> list[Request]:
        """The requests of this method whose path has this part."""
        return [request for request in self.requests if request.method == method and part in request.path]

    def note(self, request: Request) -> None:
        """Keeps a request."""
        with self._changed:
            self.requests.append(request)
            self._changed.notify_all()

    def wait_for(self, seen: Callable[[], bool]) -> None:
        """Returns once ``seen`` finds what it looks for among the requests; fails after two minutes."""
        with self._changed:
            assert self._changed.wait_for(seen, timeout=120), self.requests

    def start(self) -> None:
        """Serves in a thread."""
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Ends that."""
        self.gate.set()
        self.answers.set()
        self.shutdown()
        self.server_close()


class _RefusedError(Exception):
    """Ends a request with a status and the hub's own headers."""

    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.headers = {"X-Error-Code": code, "X-Error-Message": message}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body of an answer in one piece
    server: HubServer

    def do_GET(self) -> None:
        self._serve()

    def do_HEAD(self) -> None:
        self._serve()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 -- its name there
        pass

    def _serve(self) -> None:
        url = urlsplit(self.path)
        self._token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        asked = url.path + (f"?{url.query}" if url.query else "")
        self.server.note(Request(self.command, asked, self.headers.get("Range", ""), self._token, bool(url.netloc)))
        try:
            if self.server.failing is not None:
                raise _RefusedError(self.server.failing)
            if self._token and self._token not in self.server.tokens:
                raise _RefusedError(401, message="Invalid credentials in Authorization header")
            parts = [unquote(part) for part in url.path.strip("/").split("/")]
            match parts:
                case ["api", "models", owner, name]:
                    self._info(f"{owner}/{name}", "main")
                case ["api", "models", owner, name, "revision", revision]:
                    self._info(f"{owner}/{name}", revision)
                case ["api", "models", owner, name, "tree", revision]:
                    self._tree(f"{owner}/{name}", revision, parse_qs(url.query))
                case [owner, name, "resolve", revision, *path]:
                    self._resolve(f"{owner}/{name}", revision, "/".join(path))
                case ["lfs", digest]:
                    self._large(digest)
                case _:
                    raise _RefusedError(404)
        except _RefusedError as refused:
            self._answer(refused.status, str(refused).encode(), refused.headers)

    def _repo(self, name: str, revision: str) -> tuple[Repo, str]:
        """The repository and the commit that is meant."""
        repo = self.server.repos.get(name)
        if repo is None or (repo.private and not self._token):
            if self._token:
                raise _RefusedError(404, "RepoNotFound", "Repository not found")
            raise _RefusedError(401, "RepoNotFound", "Invalid username or password.")
        commit = repo.refs.get(revision, revision)
        if commit not in repo.commits:
            raise _RefusedError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repo, commit

    def _info(self, name: str, revision: str) -> None:
        self.server.answers.wait()
        repo, commit = self._repo(name, revision)
        siblings = [{"rfilename": path} for path in repo.commits[commit]]
        self._json({"id": name, "sha": commit, "private": repo.private, "gated": repo.gated, "siblings": siblings})

    def _tree(self, name: str, revision: str, query: dict[str, list[str]]) -> None:
        """Two entries a page, so that clients have to turn pages."""
        repo, commit = self._repo(name, revision)
        entries = [self._entry(repo, path, content) for path, content in sorted(repo.commits[commit].items())]
        start = int(query.get("cursor", ["0"])[0])
        headers = {}
        if start + 2 < len(entries):
            headers["Link"] = f'<{self.server.url}/api/models/{name}/tree/{revision}?cursor={start + 2}>; rel="next"'
        self._json(entries[start : start + 2], headers)

    @staticmethod
    def _entry(repo: Repo, path: str, content: bytes) -> dict[str, Any]:
        size = repo.claimed.get(path, len(content))
        entry = {"type": "file", "path": path, "size": size, "oid": _git_id(content)}
        if path.endswith(_LARGE):
            entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": size, "pointerSize": 134}
        return entry

    def _resolve(self, name: str, revision: str, path: str) -> None:
        repo, commit = self._repo(name, revision)
        content = repo.commits[commit].get(path)
        headers = {"X-Repo-Commit": commit}
        if content is None:
            raise _RefusedError(404, "EntryNotFound", "Entry not found")
        if repo.gated and self._token not in repo.admitted:
            raise _RefusedError(403 if self._token else 401, "GatedRepo", f"Access to model {name} is restricted.")
        if not path.endswith(_LARGE):
            self._answer(200, content, headers | {"ETag": f'"{_git_id(content)}"'})
            return
        digest = hashlib.sha256(content).hexdigest()
        headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content))}
        self._answer(302, b"", headers | {"Location": f"http://localhost:{self.server.server_address[1]}/lfs/{digest}"})

    def _large(self, digest: str) -> None:
        every = (files for repo in self.server.repos.values() for files in repo.commits.values())
        contents = {hashlib.sha256(content).hexdigest(): content for files in every for content in files.values()}
        content = contents.get(digest)
        if content is None or digest in self.server.lost:
            raise _RefusedError(404 if content is None else 500)
        first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        part = content[first:]
        headers = {"ETag": f'"{digest}"', "Accept-Ranges": "bytes"}
        if "Range" in self.headers:
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        self.server.gate.wait()
        cut = self.server.cuts.pop(0) if self.server.cuts and self.command == "GET" else len(part)
        if self.command == "GET":
            self.server.sent[digest] = self.server.sent.get(digest, 0) + len(part[:cut])
        self._answer(206 if "Range" in self.headers else 200, part, headers, cut)

    def _json(self, content: Any, headers: dict[str, str] | None = None) -> None:
        self._answer(200, json.dumps(content).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _answer(self, status: int, content: bytes, headers: dict[str, str], cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[:cut])
        if cut is not None and cut < len(content):
            self.close_connection = True


def _git_id(content: bytes) -> str:
    """The id that git gives to a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
