"""Makes the store that a URL names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from sapwood_common.errors import ConfigError
from sapwood_worker.cache.storage.backend import StorageBackend
from sapwood_worker.cache.storage.file import FileStorage
from sapwood_worker.cache.storage.mooncake import MooncakeOptions, MooncakeStorage
from sapwood_worker.cache.storage.nixl import NixlFileStorage, NixlObjectStorage

_GIB = 1 << 30


def parse_storage(url: str) -> Callable[[], StorageBackend]:
    """What opens the store of a URL; the opening may block and fail with StorageError, the parsing does neither.

    - ``file:///folder?size_gb=10``
    - ``mooncake://master:50051?metadata=http://host:8080/metadata&protocol=tcp&devices=&host=&lend_gb=0``
    - ``nixl://posix/folder?size_gb=10``
    - ``nixl://obj/bucket?endpoint=http://host:9000&region=us-east-1``

    Raises:
        ConfigError: It is not such a URL; the message says what is wrong with it.
    """
    try:
        parts = urlsplit(url)
        given = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError as error:
        raise ConfigError(f"--storage: {url!r} is not a URL: {error}") from error
    match parts.scheme:
        case "file":
            folder, size = _folder(url, parts.path, given)
            _expect(url, not parts.netloc and folder.is_absolute(), "name an absolute folder: file:///folder")
            _expect_none(url, given)
            return lambda: FileStorage(folder, size)
        case "mooncake":
            lend = _number(url, given.pop("lend_gb", "0"))
            options = MooncakeOptions(
                master=parts.netloc,
                metadata=given.pop("metadata", ""),
                protocol=given.pop("protocol", "tcp"),
                devices=given.pop("devices", ""),
                host=given.pop("host", ""),
                lend_bytes=int(lend * _GIB),
            )
            _expect(url, bool(parts.netloc), "name the master: mooncake://host:port")
            _expect(url, bool(options.metadata), "metadata is missing: the URL of the metadata server")
            _expect(url, options.protocol in ("tcp", "rdma"), "protocol must be tcp or rdma")
            _expect_none(url, given)
            return lambda: MooncakeStorage(options)
        case "nixl" if parts.netloc == "posix":
            folder, size = _folder(url, parts.path, given)
            _expect(url, folder.is_absolute() and folder != Path("/"), "name an absolute folder: nixl://posix/folder")
            _expect_none(url, given)
            return lambda: NixlFileStorage(folder, size)
        case "nixl" if parts.netloc == "obj":
            bucket, endpoint = parts.path.strip("/"), given.pop("endpoint", "")
            _expect(url, bool(bucket) and "/" not in bucket, "name a bucket: nixl://obj/bucket")
            settings = {"region": given.pop("region", "us-east-1")}
            if endpoint:
                scheme = endpoint.partition("://")[0]
                _expect(url, scheme in ("http", "https"), "endpoint must be a URL: http://host:port")
                settings |= {"endpoint_override": endpoint, "scheme": scheme}
            _expect_none(url, given)
            return lambda: NixlObjectStorage(bucket, settings)
        case "nixl":
            raise ConfigError(f"--storage: {url!r} must begin with nixl://posix/ or nixl://obj/")
        case _:
            raise ConfigError(f"--storage: {url!r} must begin with file:, mooncake: or nixl:")


def _folder(url: str, path: str, given: dict[str, str]) -> tuple[Path, int]:
    """The folder of a URL's path, and the most bytes it is to hold."""
    folder, size = Path(unquote(path)), _number(url, given.pop("size_gb", "10"))
    _expect(url, size > 0, "size_gb must be more than 0")
    return folder, int(size * _GIB)


def _number(url: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"--storage: {text!r} in {url!r} is not a number") from None


def _expect(url: str, condition: bool, problem: str) -> None:
    if not condition:
        raise ConfigError(f"--storage: {url!r}: {problem}")


def _expect_none(url: str, given: dict[str, str]) -> None:
    _expect(url, not given, f"unknown setting {next(iter(given), '')!r}")
