"""`sapwood batch`: sends a file of requests to a router, which answers them when there is room, and fetches the answers."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sapwood.cli.errors import EXIT_CODES, FAILED, REFUSED, UNREACHABLE, CliError
from sapwood.cli.terminal import harmless
from sapwood.cli.top import table

_TIMEOUT = 60.0
_LOOK_SECONDS = 1.0
_PIECE = 64 * 1024
_OPEN = ("validating", "in_progress", "finalizing", "cancelling")


def configure(verbs: Any) -> None:
    """Adds the verb to the parser."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        "batch",
        help="have a file of requests answered when there is room",
        description="Has a router answer a file of requests (JSONL, as OpenAI's batches), with the lowest priority.",
        epilog=EXIT_CODES,
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True, title="actions")
    run = _action(actions, "run", "send a file, wait, and fetch the answers", _run)
    run.add_argument("file", metavar="FILE", type=Path, help="a line a request: custom_id, method, url, body")
    run.add_argument("-o", "--output", metavar="FILE", type=Path, help="Where answers go. [default: standard output]")
    run.add_argument("--errors", metavar="FILE", type=Path, help="Where errors go. [default: standard error]")
    run.add_argument("--window", default="24h", metavar="TIME", help="The time that it may take. [default: 24h]")
    run.add_argument("--detach", action="store_true", help="Only begin it, and print its id. [default: no]")
    _action(actions, "list", "show the batches", _list)
    for name, what, function in (
        ("show", "show a batch", _show),
        ("cancel", "end a batch early", _cancel),
        ("fetch", "wait for a batch, and fetch the answers", _fetch),
    ):
        action = _action(actions, name, what, function)
        action.add_argument("id", metavar="ID", help="the batch")
        if name == "fetch":
            action.add_argument("-o", "--output", metavar="FILE", type=Path, help="As for run.")
            action.add_argument("--errors", metavar="FILE", type=Path, help="As for run.")


def _action(actions: Any, name: str, what: str, run: Any) -> argparse.ArgumentParser:
    action: argparse.ArgumentParser = actions.add_parser(name, help=what, description=f"{what[:1].upper()}{what[1:]}.")
    action.add_argument(
        "--url",
        default=os.environ.get("SAPWOOD_URL", "http://127.0.0.1:8000"),
        metavar="URL",
        help="The router's HTTP port. [default: SAPWOOD_URL, else http://127.0.0.1:8000]",
    )
    action.add_argument(
        "--api-key", default=os.environ.get("SAPWOOD_API_KEY", ""), metavar="KEY", help="[default: SAPWOOD_API_KEY]"
    )
    action.set_defaults(run=run)
    return action


def _run(arguments: argparse.Namespace) -> int:
    file_id = _upload(arguments, arguments.file)["id"]
    with arguments.file.open("rb") as lines:
        endpoint = _endpoint(lines.readline())
    asked = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": arguments.window}
    batch = _ask(arguments, "POST", "/v1/batches", asked)
    print(f"batch {batch['id']}", file=sys.stderr)
    if arguments.detach:
        print(batch["id"])
        return 0
    return _wait_and_fetch(arguments, batch["id"])


def _fetch(arguments: argparse.Namespace) -> int:
    return _wait_and_fetch(arguments, arguments.id)


def _list(arguments: argparse.Namespace) -> int:
    rows = [("BATCH", "STATUS", "LINES", "ANSWERED", "FAILED", "ENDPOINT")]
    for batch in _ask(arguments, "GET", "/v1/batches?limit=100")["data"]:
        counts = batch["request_counts"]
        numbers = (str(counts[name]) for name in ("total", "completed", "failed"))
        rows.append((batch["id"], batch["status"], *numbers, batch["endpoint"]))
    print("\n".join(table(rows)))
    return 0


def _show(arguments: argparse.Namespace) -> int:
    print(harmless(json.dumps(_ask(arguments, "GET", f"/v1/batches/{arguments.id}"), indent=2)))
    return 0


def _cancel(arguments: argparse.Namespace) -> int:
    print(_ask(arguments, "POST", f"/v1/batches/{arguments.id}/cancel", {})["status"])
    return 0


def _wait_and_fetch(arguments: argparse.Namespace, batch_id: str) -> int:
    while (batch := _ask(arguments, "GET", f"/v1/batches/{batch_id}"))["status"] in _OPEN:
        time.sleep(_LOOK_SECONDS)
    counts = batch["request_counts"]
    summary = f"{batch['status']}: {counts['completed']} of {counts['total']} lines answered, {counts['failed']} failed"
    print(summary, file=sys.stderr)
    for problem in (batch.get("errors") or {"data": []})["data"]:
        print(harmless(f"line {problem['line']}: {problem['message']}"), file=sys.stderr)
    for name, path, other in (
        ("output_file_id", arguments.output, sys.stdout),
        ("error_file_id", arguments.errors, sys.stderr),
    ):
        if batch.get(name):
            _download(arguments, batch[name], path, other)
    return 0 if batch["status"] == "completed" and not counts["failed"] else FAILED


def _endpoint(line: bytes) -> str:
    try:
        return str(json.loads(line)["url"])
    except (ValueError, KeyError, TypeError):
        raise CliError("the file's first line has no url", REFUSED) from None


def _connection(arguments: argparse.Namespace) -> http.client.HTTPConnection:
    parts = urlsplit(arguments.url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname or "", parts.port, timeout=_TIMEOUT)


def _send(
    arguments: argparse.Namespace, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """Sends a request. The answer's head is there, its body to be read.

    Raises:
        CliError: The router is not there, or refuses.
    """
    connection = _connection(arguments)
    key = {"authorization": f"Bearer {arguments.api_key}"} if arguments.api_key else {}
    try:
        connection.request(method, path, body, {**key, **(headers or {})})
        answer = connection.getresponse()
    except OSError as error:
        raise CliError(
            f"--url {arguments.url}: no server answers: {error}; `sapwood up` starts one here", UNREACHABLE
        ) from error
    if answer.status >= 400:
        text = answer.read().decode("utf-8", "replace")
        try:
            text = json.loads(text)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            text = text[:500]
        raise CliError(f"{answer.status}: {text}", REFUSED if answer.status < 500 else FAILED)
    return connection, answer


def _ask(arguments: argparse.Namespace, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    encoded = None if body is None else json.dumps(body).encode()
    connection, answer = _send(arguments, method, path, encoded, {"content-type": "application/json"})
    found: dict[str, Any] = json.loads(answer.read())
    connection.close()
    return found


def _upload(arguments: argparse.Namespace, path: Path) -> dict[str, Any]:
    boundary = secrets.token_hex(16)
    head = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="batch.jsonl"\r\n\r\n'
    ).encode()
    end = f"\r\n--{boundary}--\r\n".encode()
    try:
        size = path.stat().st_size

        def pieces() -> Iterator[bytes]:
            yield head
            with path.open("rb") as file:
                while piece := file.read(_PIECE):
                    yield piece
            yield end

        headers = {
            "content-type": f"multipart/form-data; boundary={boundary}",
            "content-length": str(len(head) + size + len(end)),
        }
        connection, answer = _send(arguments, "POST", "/v1/files", pieces(), headers)
    except OSError as error:
        raise CliError(f"{path}: {error.strerror}", REFUSED) from error
    found: dict[str, Any] = json.loads(answer.read())
    connection.close()
    return found


def _download(arguments: argparse.Namespace, file_id: str, path: Path | None, other: Any) -> None:
    connection, answer = _send(arguments, "GET", f"/v1/files/{file_id}/content")
    if path is None:
        shutil.copyfileobj(answer, other.buffer)
        other.flush()
    else:
        with path.open("wb") as file:
            shutil.copyfileobj(answer, file)
    connection.close()
