"""What went wrong when a model of the hub was fetched, in one line that says what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import httpx2
from huggingface_hub import errors, get_token


def explain(
    error: Exception, repo: str, file: str | None, revision: str | None, *, endpoint: str, cache: Path
) -> str | None:
    """The line.

    Args:
        error: What the library raised.
        repo: The model that was asked for, as ``owner/name``.
        file: The one file of it that was asked for.
        revision: The revision that was asked for.
        endpoint: The hub's URL.
        cache: The folder of what is fetched.

    Returns:
        None if the error is none of the library's, of the network's or of the disk's.
    """
    for cause in _chain(error):
        match cause:
            case errors.GatedRepoError():
                page = f"accept its terms at {endpoint}/{repo}"
                if get_token() is None:
                    return f"{repo} is gated: {page}, then set HF_TOKEN to a token of yours"
                return f"{repo} is gated, and the token has no access to it: {page} with the token's account"
            case errors.RevisionNotFoundError():
                return f"{repo} has no branch, tag or commit {revision!r} (--revision)"
            case errors.RemoteEntryNotFoundError():
                return f"{repo} has no file {file or ''}".rstrip() + f": its files are listed at {endpoint}/{repo}"
            case errors.RepositoryNotFoundError():
                hint = "set HF_TOKEN" if get_token() is None else "take a token that may read it"
                return (
                    f"{repo!r} is neither a file or folder here nor a model of {endpoint}: check the spelling, or, if it "
                    f"is private, {hint}"
                )
            case errors.OfflineModeIsEnabled():
                return (
                    f"{repo} is not wholly in the cache at {cache}, and HF_HUB_OFFLINE forbids to fetch it: unset that, or "
                    f"fetch it where there is a network: sapwood model fetch {repo}"
                )
            case errors.HfHubHTTPError():
                return f"{repo}: {_answered(cause, endpoint)}"
            case errors.FileMetadataError():
                return f"{repo}: what answers at {endpoint} is not a hub: check HF_ENDPOINT and proxies"
            case httpx2.ProxyError():
                return f"{repo}: the proxy refuses ({cause}): check HTTPS_PROXY, HTTP_PROXY and NO_PROXY"
            case httpx2.ConnectError() | httpx2.TimeoutException():
                return (
                    f"{repo} is not wholly in the cache at {cache}, and {endpoint} cannot be reached ({cause}): check "
                    "the network, HTTPS_PROXY and HF_ENDPOINT"
                )
            case httpx2.HTTPError():
                return (
                    f"{repo}: the connection to {endpoint} broke ({cause or type(cause).__name__}): try again; files that "
                    "are whole are kept"
                )
            case OSError(errno=errno.ENOSPC):
                return f"{repo}: the disk of {cache} is full: make room, or set HF_HOME to a folder elsewhere"
            case OSError(errno=int(), strerror=str(reason)):
                return f"{repo}: cannot write under {cache}: {reason} (HF_HOME chooses another place)"
            case errors.HFValidationError():
                return f"{repo!r} is no name of a model: {cause}"
    match error:
        case errors.LocalEntryNotFoundError():
            return f"{repo}: {_first_line(error)}"
        case OSError() | ValueError():
            return f"{repo}: {_first_line(error)}"
    return None


def _answered(error: errors.HfHubHTTPError, endpoint: str) -> str:
    status = error.response.status_code
    if status == 401:
        return f"{endpoint} does not know the token: set HF_TOKEN to a valid one, or unset it for a public model"
    if status == 403:
        return f"{endpoint} forbids it: {error.server_message or 'the token may not read it'}"
    if status == 429:
        return f"{endpoint} has had too many requests: wait, or set HF_TOKEN for a larger allowance"
    return f"{endpoint} answered {status} {error.response.reason_phrase}: try again later"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yields the error, its cause, and so on: the library raises "not in the cache" for every failure to fetch."""
    while error is not None:
        yield error
        error = error.__cause__


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line), type(error).__name__)
