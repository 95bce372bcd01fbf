"""Models at a URL that fsspec reads, such as ``s3://bucket/folder``: fetched into Sapwood's own cache.

Each state of what lies at a URL, recognised by the names, sizes and ETags of its files, has a folder of its own. A file gets its
name there when it is whole; one that is not is gone on with. A file lock makes concurrent calls wait for the first one.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sapwood_common.errors import ConfigError
from sapwood_common.models.gguf_parts import part_names
from sapwood_common.models.progress import Progress, unreported
from sapwood_common.models.wanted import description_among, weights_among
from sapwood_common.telemetry.shown_text import without_credentials

_URL = re.compile(r"[a-z][a-z0-9+.-]*://.+")
_REFUSED = re.compile(r"status code: 40[13]\b|Unauthenticated")
"""Marks a refusal in obstore's messages. The number alone will not do: it may be part of a port or a time."""
_PIECE = 8 << 20
_VERSION_KEYS = ("e_tag", "ETag", "etag", "LastModified", "mtime", "created")
"""fsspec's names for a value that changes with a file's content."""
_MOST_TRIES = 3
_SOURCE = "source.json"


def is_url(text: str) -> bool:
    """Whether this is a URL, rather than a file, a folder or a name."""
    return _URL.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class _Remote:
    """A file at the URL.

    Attributes:
        path: Its path for the file system.
        size: Its bytes.
        version: Another for another content.
    """

    path: str
    size: int
    version: str


class UrlModels:
    """The models that were fetched from URLs.

    Args:
        folder: Where they are kept.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, url: str, *, weights: bool = True, may_fetch: bool = True, progress: Progress = unreported) -> Path:
        """The local folder, or ``.gguf`` file, of a model at a URL; missing files are fetched.

        Args:
            url: Where a folder in Hugging Face's format is, or a ``.gguf`` file, or one of several files of a model.
            weights: Whether the safetensors of a folder are wanted too.
            may_fetch: Whether anything may be asked of the network; if not, it is the state that was fetched last.
            progress: Called with how far it is.

        Raises:
            ConfigError: It cannot be fetched, or is not here; the message is one line that says what to do.
        """
        url = part_names(url.rstrip("/"))[0]
        if not may_fetch:
            return self._fetched_last(url)
        try:
            return self._fetch(url, weights, progress)
        except ConfigError:
            raise
        except Exception as error:  # file systems raise errors of their own
            raise ConfigError(f"--model: {url}: {_explain(error, url, self._folder)}") from error

    def known(self) -> Iterator[tuple[str, Path]]:
        """URL and folder of each state that was fetched with its weights, the last one first."""
        sources = self._folder.glob(f"*/{_SOURCE}")
        for source in sorted(sources, key=lambda path: path.stat().st_mtime_ns, reverse=True):
            yield json.loads(source.read_text())["url"], source.parent

    def _fetched_last(self, url: str) -> Path:
        folder = next((folder for known, folder in self.known() if known == url), None)
        if folder is None:
            raise ConfigError(f"--model: {url} is not under {self._folder}; fetch it: sapwood model fetch {url}")
        return folder / _name_of(url)

    def _fetch(self, url: str, weights: bool, progress: Progress) -> Path:
        system, root = _open(url)
        files = _list(system, root, url)
        state = json.dumps([url, sorted((name, file.size, file.version) for name, file in files.items())])
        folder = self._folder / hashlib.sha256(state.encode()).hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / _name_of(url)
        single = "" in files
        if not single:
            target.mkdir(exist_ok=True)
        with _locked(folder / ".lock"):
            wanted = list(files) if single else description_among(files)
            if weights and not single:
                wanted += _weights(system, files, url)
            places = {
                name: (target.with_name(name) if single else target / name) if name else target for name in wanted
            }
            missing = {place: files[name] for name, place in places.items() if not place.is_file()}
            _check_space(missing, folder, url)
            _copy(system, missing, f"fetching {url}", progress)
            if weights or single:
                (folder / _SOURCE).write_text(json.dumps({"url": url}))
        return target


class UrlFolders:
    """Folders that were fetched from URLs, a few named files of each.

    Args:
        folder: Where they are kept.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, url: str, names: Sequence[str], *, may_fetch: bool = True) -> Path:
        """The local folder with the files of these names at a URL; missing files are fetched.

        Args:
            url: Where the folder is.
            names: The files; all of them have to be there.
            may_fetch: Whether anything may be asked of the network; if not, it is the state that was fetched last.

        Raises:
            ConfigError: A file is not there, or cannot be fetched; the message is one line.
        """
        url = url.rstrip("/")
        shown = without_credentials(url)
        if not may_fetch:
            for source in sorted(self._folder.glob(f"*/{_SOURCE}"), key=lambda path: -path.stat().st_mtime_ns):
                if json.loads(source.read_text())["url"] == url:
                    return source.parent / _name_of(url)
            raise ConfigError(f"{shown} is not under {self._folder}")
        try:
            system, root = _open(url)
            system.invalidate_cache()
            files = {name: _remote(f"{root}/{name}", system.info(f"{root}/{name}")) for name in names}
            state = json.dumps([url, sorted((name, file.size, file.version) for name, file in files.items())])
            folder = self._folder / hashlib.sha256(state.encode()).hexdigest()[:16]
            target = folder / _name_of(url)
            target.mkdir(parents=True, exist_ok=True)
            with _locked(folder / ".lock"):
                missing = {target / name: file for name, file in files.items() if not (target / name).is_file()}
                _check_space(missing, folder, shown)
                _copy(system, missing, f"fetching {shown}", unreported)
                (folder / _SOURCE).write_text(json.dumps({"url": url}))
            return target
        except ConfigError as error:
            raise ConfigError(str(error).removeprefix("--model: ")) from error
        except Exception as error:  # file systems raise errors of their own
            raise ConfigError(f"{shown}: {_explain(error, url, self._folder)}") from error


def _open(url: str) -> tuple[Any, str]:
    """The file system and the path in it."""
    import fsspec

    protocol = url.partition("://")[0]
    options: dict[str, Any] = {}
    if protocol == "s3":
        with suppress(ImportError):  # fsspec then looks for s3fs
            from obstore.fsspec import register

            register("s3")
            options["retry_config"] = {"max_retries": _MOST_TRIES}
    system, root = fsspec.core.url_to_fs(url, **options)
    return system, str(root).rstrip("/")


def _list(system: Any, root: str, url: str) -> dict[str, _Remote]:
    """What could be wanted of what lies there, by name; a single file has no name, nor has the first of several.

    Raises:
        ConfigError: It is no model.
    """
    system.invalidate_cache()
    if url.endswith(".gguf"):
        first, *others = part_names(root)
        files = {"": _remote(first, system.info(first))}
        return files | {_name_of(each): _remote(each, system.info(each)) for each in others}
    listed = system.find(root, detail=True)
    found = {str(path).removeprefix(root).lstrip("/"): _remote(str(path), info) for path, info in listed.items()}
    names = [*description_among(found), *(name for name in found if name.endswith(".safetensors"))]
    if "config.json" not in found:
        raise ConfigError(
            f"--model: {url} holds no config.json, so it is no folder in Hugging Face's format: check the URL and, where it has "
            "keys, their rights"
        )
    return {name: found[name] for name in names if ".." not in name.split("/")}


def _remote(path: str, info: dict[str, Any]) -> _Remote:
    version = next((str(info[key]) for key in _VERSION_KEYS if info.get(key) is not None), "")
    return _Remote(path, int(info["size"]), version)


def _weights(system: Any, files: dict[str, _Remote], url: str) -> list[str]:
    names = list(weights_among(files, lambda name: str(system.cat_file(files[name].path), "utf-8")))
    unknown = next((name for name in names if name not in files), None)
    if unknown is not None:
        raise ConfigError(f"--model: {url} has no {unknown}: weights are read from safetensors or a .gguf file")
    return names


def _copy(system: Any, missing: dict[Path, _Remote], text: str, progress: Progress) -> None:
    total = sum(file.size for file in missing.values())
    done = 0
    for place, file in missing.items():
        place.parent.mkdir(parents=True, exist_ok=True)
        partial = place.with_name(place.name + ".partial")
        with partial.open("ab") as target, system.open(file.path, "rb") as source:
            if target.tell() > file.size:
                target.truncate(0)
            done += target.tell()
            source.seek(target.tell())
            while piece := source.read(_PIECE):
                target.write(piece)
                done += len(piece)
                progress(text, done, total)
            written = target.tell()
        if written != file.size:
            partial.unlink()
            raise OSError(f"{file.path} has {written} bytes, not {file.size}: it has changed; try again")
        partial.replace(place)


def _check_space(missing: dict[Path, _Remote], folder: Path, url: str) -> None:
    needed, free = sum(file.size for file in missing.values()), shutil.disk_usage(folder).free
    if needed > free:
        raise ConfigError(
            f"--model: {url} needs {needed / 1e6:.0f} MB under {folder}, {free / 1e6:.0f} MB are free (SAPWOOD_HOME chooses "
            "another place)"
        )


def _name_of(url: str) -> str:
    return url.rpartition("/")[2]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _explain(error: Exception, url: str, folder: Path) -> str:
    protocol = url.partition("://")[0]
    line = next((line for line in str(error).splitlines() if line), type(error).__name__)
    if isinstance(error, ImportError):
        return "needs: pip install 'sapwood[s3]'" if protocol == "s3" else f"needs a package of fsspec's: {line}"
    if isinstance(error, FileNotFoundError):
        return "nothing lies there"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"the disk of {folder} is full: make room, or set SAPWOOD_HOME to a folder elsewhere"
    if isinstance(error, PermissionError) or _REFUSED.search(line):
        keys = " (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL)" if protocol == "s3" else ""
        return f"it may not be read: check the keys{keys}: {line}"
    return f"it cannot be read: {line}"
