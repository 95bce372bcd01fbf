"""Models of the Hugging Face hub: their names, and their files in the cache of the hub's own library.

The library (huggingface_hub) does the work and reads its own variables: HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE, those of
proxies. Its locks let several processes of a host fetch a file once.
"""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sapwood_common.errors import ConfigError
from sapwood_common.models.gguf_parts import part_names
from sapwood_common.models.progress import Progress, unreported
from sapwood_common.models.wanted import DESCRIPTION, weights_among

_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<file>[^:]+\.gguf|\w[\w.-]*))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubName:
    """A model of the hub.

    Attributes:
        repo: ``owner/name``.
        file: The one ``.gguf`` file of it that is meant, or one of several files of a model, or a part of its name, such as
            ``Q4_K_M``; None: its safetensors, or ``pytorch_model.bin``.
    """

    repo: str
    file: str | None = None

    def __str__(self) -> str:
        return self.repo if self.file is None else f"{self.repo}:{self.file}"


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model in the cache.

    Attributes:
        path: Its folder, or its ``.gguf`` file.
        commit: The commit that it is of; with it as the revision nothing is asked of the network again.
    """

    path: Path
    commit: str


def parse_hub_name(text: str) -> HubName | None:
    """The model that ``owner/name``, ``owner/name:file.gguf`` or ``owner/name:Q4_K_M`` names; None for other texts."""
    found = _NAME.fullmatch(text)
    if found is None or (found["file"] is None and text.endswith(".gguf")):
        return None
    return HubName(found["repo"], found["file"])


class Hub:
    """The hub as its library sees it.

    Args:
        endpoint: Its URL; None: HF_ENDPOINT, else https://huggingface.co.
        cache: The folder of what is fetched; None: the library's own, which is under HF_HOME.
        may_fetch: Whether anything may be fetched; if not, nothing is asked of the network.
        patience: Seconds after which a hub that does not answer counts as one that cannot be reached.

    Raises:
        ConfigError: The library is not installed.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        cache: Path | None = None,
        *,
        may_fetch: bool = True,
        patience: float = 30.0,
    ) -> None:
        try:
            from huggingface_hub import constants
        except ImportError:
            raise ConfigError("--model: a model of the hub needs: pip install 'sapwood[models]'") from None
        self._endpoint = endpoint or constants.ENDPOINT
        self._cache = cache or Path(constants.HF_HUB_CACHE)
        self._may_fetch = may_fetch
        self._patience = patience
        self._options: dict[str, Any] = {
            "endpoint": self._endpoint,
            "cache_dir": self._cache,
            "local_files_only": not may_fetch,
            "library_name": "sapwood",
        }

    def find(
        self, name: HubName, revision: str | None = None, *, weights: bool = True, progress: Progress = unreported
    ) -> HubModel:
        """Finds a model's files in the cache, where those that are missing are fetched.

        Args:
            name: The model.
            revision: Its branch, tag or commit; None: ``main``.
            weights: Whether its weights are wanted too; without them it is enough for a tokenizer.
            progress: Called with how far it is.

        Raises:
            ConfigError: They cannot be fetched, or may not; the message is one line that says what to do.
        """
        from sapwood_common.models.hub_errors import explain

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # such as for a disk that is too small: what comes of it is said below
                return self._find(name, revision, weights, progress)
        except ConfigError:
            raise
        except Exception as error:  # the library raises its own errors, its HTTP client's, OSError and ValueError
            if not self._may_fetch:
                said = f"{name} is not wholly in the cache at {self._cache}; fetch it: sapwood model fetch {name}"
                raise ConfigError(f"--model: {said}") from error
            explained = explain(error, name.repo, name.file, revision, endpoint=self._endpoint, cache=self._cache)
            if explained is None:
                raise
            raise ConfigError(f"--model: {explained}") from error

    def find_files(self, repo: str, files: Sequence[str], revision: str | None = None) -> Path:
        """The folder in the cache with these files of a repository; those that are missing are fetched.

        Args:
            repo: ``owner/name``.
            files: Their names.
            revision: Branch, tag or commit; None: ``main``.

        Raises:
            ConfigError: One of them is not there, or cannot be fetched; the message is one line.
        """
        from sapwood_common.models.hub_errors import explain

        try:
            folder = self._described(repo, revision, list(files))
        except Exception as error:  # as for find()
            if not self._may_fetch:
                raise ConfigError(f"{repo} is not wholly in the cache at {self._cache}") from error
            explained = explain(error, repo, None, revision, endpoint=self._endpoint, cache=self._cache)
            if explained is None:
                raise
            raise ConfigError(explained) from error
        for name in files:
            if not (folder / name).is_file():
                raise ConfigError(f"{repo} has no {name}")
        return folder

    def _find(self, name: HubName, revision: str | None, weights: bool, progress: Progress) -> HubModel:
        folder = self._described(name.repo, revision, [] if name.file is not None else list(DESCRIPTION))
        commit = folder.name
        sizes = self._sizes(name.repo, commit)
        if name.file is not None:
            files = part_names(_gguf_meant(name, sizes))
            self._fetch(name, folder, files, sizes, progress)
            return HubModel(folder / files[0], commit)
        if not (folder / "config.json").is_file():
            raise ConfigError(f"--model: {name} {_what_instead(name.repo, sizes)}")
        if weights:
            self._fetch(name, folder, _weights_of(folder, sizes), sizes, progress)
        return HubModel(folder, commit)

    def _described(self, repo: str, revision: str | None, patterns: list[str]) -> Path:
        """The folder of the model's commit, with the files that the patterns name."""
        from huggingface_hub import snapshot_download

        silence = self._silence(repo, revision)
        options = self._options if silence is None else self._options | {"local_files_only": True}
        quiet = _bar_of(_Report("", unreported, 0))
        try:
            found = snapshot_download(repo, revision=revision, allow_patterns=patterns, tqdm_class=quiet, **options)
        except FileNotFoundError as error:
            raise error from (silence or error.__cause__)
        return Path(found)

    def _silence(self, repo: str, revision: str | None) -> Exception | None:
        """Asks the hub for the model; None unless it does not answer in time. The library's own question has no time limit."""
        import httpx2
        from huggingface_hub import HfApi

        if not self._may_fetch or (revision is not None and _COMMIT.fullmatch(revision)):
            return None
        try:
            HfApi(self._endpoint, library_name="sapwood").model_info(repo, revision=revision, timeout=self._patience)
        except httpx2.TimeoutException as error:
            return error
        except (httpx2.HTTPError, OSError):
            pass  # the library gets the same error, and looks into the cache
        return None

    def _fetch(
        self, name: HubName, folder: Path, files: Sequence[str], sizes: dict[str, int], progress: Progress
    ) -> None:
        """Fetches large files, those that are not in the folder of their commit."""
        from huggingface_hub import hf_hub_download

        unknown = next((file for file in files if sizes and file not in sizes), None)
        if unknown is not None:
            raise ConfigError(f"--model: {name} has no {unknown}: weights are read from safetensors or a .gguf file")
        missing = [file for file in files if not (folder / file).exists()]
        total = sum(sizes.get(file, 0) for file in missing)
        free = shutil.disk_usage(self._cache).free
        if total > free and self._may_fetch:
            raise ConfigError(
                f"--model: {name} needs {total / 1e6:.0f} MB under {self._cache}, {free / 1e6:.0f} MB are free "
                "(HF_HOME chooses another place)"
            )
        bar = _bar_of(_Report(f"fetching {name}", progress, total))
        for file in missing:  # one after the other, so that Ctrl-C ends it at once
            hf_hub_download(name.repo, file, revision=folder.name, tqdm_class=bar, **self._options)

    def _sizes(self, repo: str, commit: str) -> dict[str, int]:
        """The bytes of each file of the model; empty if an older version of the library has filled the cache."""
        from huggingface_hub import get_cached_repo_tree
        from huggingface_hub.errors import CachedRepoTreeNotFoundError

        try:
            return {file.path: file.size for file in get_cached_repo_tree(repo, revision=commit, cache_dir=self._cache)}
        except CachedRepoTreeNotFoundError:
            return {}


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A revision of a model in the cache.

    Attributes:
        name: ``owner/name``.
        revision: Branches and tags that are of this commit, and the commit's first letters.
        size: Bytes on disk.
    """

    name: str
    revision: str
    size: int


def cached_models() -> list[CachedModel]:
    """The models in the cache of the hub's library that a worker could serve, by name."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return []
    found = [
        CachedModel(repo.repo_id, " ".join([*sorted(revision.refs), revision.commit_hash[:12]]), revision.size_on_disk)
        for repo in repos
        for revision in repo.revisions
        if repo.repo_type == "model"
        and any(file.file_name == "config.json" or file.file_name.endswith(".gguf") for file in revision.files)
    ]
    return sorted(found, key=lambda model: (model.name, model.revision))


def remove_cached(name: str) -> int:
    """Removes all revisions of a model from the cache of the hub's library; returns the bytes freed."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return 0
    revisions = [
        revision.commit_hash
        for repo in cache.repos
        if repo.repo_type == "model" and repo.repo_id == name
        for revision in repo.revisions
    ]
    plan = cache.delete_revisions(*revisions)
    plan.execute()
    return int(plan.expected_freed_size)


def _weights_of(folder: Path, known: Collection[str]) -> list[str]:
    names = {*known, *(path.name for path in folder.iterdir())}
    try:
        return list(weights_among(names, lambda name: (folder / name).read_text()))
    except ValueError as error:
        raise ConfigError(f"--model: {folder}: {error}") from error


def _gguf_meant(name: HubName, files: Iterable[str]) -> str:
    """The file that a name means. Raises ConfigError if it means none, or several."""
    assert name.file is not None
    ggufs = [file for file in files if file.endswith(".gguf")]
    if name.file in ggufs or (not ggufs and name.file.endswith(".gguf")):
        return name.file
    found = list(dict.fromkeys(part_names(file)[0] for file in ggufs if name.file.lower() in file.lower()))
    if len(found) == 1:
        return found[0]
    several = (
        f"has {len(found)} .gguf files with {name.file!r} in their names" if found else f"has no file {name.file!r}"
    )
    raise ConfigError(f"--model: {name.repo} {several}; {_named(name.repo, found or ggufs)}")


def _named(repo: str, ggufs: Sequence[str]) -> str:
    if not ggufs:
        return "it has no .gguf file"
    firsts = list(dict.fromkeys(part_names(file)[0] for file in ggufs))
    return f"name one: {', '.join(f'{repo}:{file}' for file in firsts[:8])}"


def _what_instead(repo: str, files: Iterable[str]) -> str:
    """Says what to ask for in place of a repository that holds no config.json."""
    found = [name for name in files if name.endswith(".gguf")]
    if not found:
        return "holds no config.json, so it is not a model in Hugging Face's format"
    return f"holds .gguf files; {_named(repo, found)}"


class _Report:
    """Adds up the bytes of several files."""

    def __init__(self, text: str, progress: Progress, total: int) -> None:
        self._text = text
        self._progress = progress
        self._done = 0
        self._total = total

    def add(self, count: int) -> None:
        """Notes that this many bytes have come; a negative number was dropped."""
        self._done += count
        if self._total:
            self._progress(self._text, max(0, min(self._done, self._total)), self._total)


def _bar_of(report: _Report) -> Any:
    """A class in place of the library's bars, which draws nothing and reports the bytes of files."""
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *values: Any, **named: Any) -> None:
            super().__init__(*values, **{**named, "disable": True})  # type: ignore[no-untyped-call]
            report.add(named.get("initial") or 0)

        def update(self, count: float | None = 1) -> None:
            report.add(int(count or 0))

        def update_transfer(self, count: float | None = 1) -> None:
            """Bytes on the wire, which are compressed where the hub stores files in pieces; those of the file are reported."""

        def set_transfer_postfix_str(self, *_: Any, **__: Any) -> None:
            """Nothing is drawn."""

    return Bar
