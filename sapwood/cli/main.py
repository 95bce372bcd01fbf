"""The `sapwood` command: verbs, and how errors leave it."""

from __future__ import annotations

import sys
from typing import NoReturn

if __name__ == "__main__" and not sys.flags.safe_path:
    sys.path.pop(0)  # ``python -m`` puts the current folder there: its numpy.py would be imported

import argparse
import difflib
import os
from importlib.metadata import version

from sapwood.cli import (
    batch,
    chat,
    completion,
    docs,
    generate,
    key,
    lora,
    model,
    router,
    run,
    scaler,
    store,
    tokenize,
    up,
)
from sapwood.cli.doctor import verb as doctor
from sapwood.cli.errors import EXIT_CODES, INTERRUPTED, REFUSED, CliError
from sapwood.cli.flags_of_others import flag_of_others, reason_without
from sapwood.cli.local import running
from sapwood.cli.local.cluster_file import read_cluster_file
from sapwood.cli.measure import bench, evaluate
from sapwood.cli.terminal import harmless
from sapwood.cli.workers import cache, kernels, weights, worker


def build_parser(verb: str = "") -> argparse.ArgumentParser:
    """The parser of the whole command line; each verb sets ``run`` to its function.

    Args:
        verb: The verb that will run: ``up`` gets the services' flags only if it is the one.

    Raises:
        CliError: The verb needs packages that are not installed.
    """
    parser = argparse.ArgumentParser(
        prog="sapwood",
        description="Runs Sapwood on this machine and talks to it.",
        epilog=f"also understood: {', '.join(_SHORT)}; {EXIT_CODES}",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"sapwood {version('sapwood')}")
    verbs = parser.add_subparsers(metavar="VERB", required=True, title="verbs")
    up.configure(verbs, with_services=verb in up.NAMES)
    for module in (
        run,
        running,
        generate,
        chat,
        tokenize,
        batch,
        store,
        bench,
        evaluate,
        model,
        kernels,
        doctor,
        docs,
        key,
        router,
        scaler,
        worker,
        lora,
        weights,
        cache,
    ):
        module.configure(verbs)
    completion.configure(verbs, lambda: build_parser("up"))
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs one command line and returns its exit code, one of those in ``sapwood.cli.errors``."""
    words = sys.argv[1:] if argv is None else argv
    try:
        if words and words[0] in up.NAMES:
            read_cluster_file(words[1:])
        parser = build_parser(words[0] if words else "")
        if not words:
            parser.print_help(sys.stderr)
            return REFUSED
        arguments = _parse(parser, words)
        exit_code: int = arguments.run(arguments)
    except CliError as failure:
        print(f"sapwood: {harmless(failure.message)}", file=sys.stderr)
        return failure.exit_code
    except ModuleNotFoundError as missing:  # a client's install has few packages
        if missing.name is None or missing.name.startswith("sapwood"):
            raise
        print(
            f"sapwood: `sapwood {words[0]}` needs more packages: pip install 'sapwood[all]' ({missing})",
            file=sys.stderr,
        )
        return REFUSED
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return exit_code


def _parse(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    verbs = _verbs(parser)
    assert verbs is not None
    words = in_full(words)
    if words[0].startswith("-") and words[0] not in ("-h", "--help", "--version"):
        known = ("--help", "--version")
        similar = ["--version"] if words[0] in ("-v", "-V") else difflib.get_close_matches(words[0], known, n=1)
        parser.error(
            f"there is no flag {words[0]}; {f'did you mean {similar[0]}?' if similar else 'a verb comes first'}"
        )
    if not words[0].startswith("-") and words[0] not in verbs.choices:
        similar = difflib.get_close_matches(words[0].lower(), [*verbs.choices, *_SHORT], n=1, cutoff=0.7)
        hint = f"did you mean {similar[0]}?" if similar else "`sapwood --help` lists them"
        hint = _INSTEAD.get(words[0], hint)
        parser.error(f"there is no verb {words[0]!r}; {hint}")
    if words[0] == "bench" and len(words) > 1 and words[1].startswith(("http://", "https://")):
        verbs.choices["bench"].error(f"a server stands with its flag: --url {words[1]}")
    if words[0] == "bench" and (strange := _strange_flag(verbs.choices["bench"], words[1:])):
        _refuse(verbs, words, [strange])  # argparse would take the flag's value for a verb of bench
    arguments, unknown = parser.parse_known_args(words)
    arguments.words = words
    if words[0] == "run" and not any(word.startswith("-") for word in unknown):
        arguments.question += unknown  # of flags between model and question argparse makes two lists of words
        unknown = []
    if unknown:
        _refuse(verbs, words, unknown)
    return arguments


def _strange_flag(verb: argparse.ArgumentParser, words: list[str]) -> str:
    """The first flag that a verb does not have; empty: it has all, or one of its own verbs is called."""
    inner = _verbs(verb)
    if inner is not None and any(word in inner.choices for word in words):
        return ""
    known = [flag for action in verb._actions for flag in action.option_strings]
    return next((word for word in words if word.startswith("--") and word.partition("=")[0] not in known), "")


def _refuse(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser], words: list[str], unknown: list[str]
) -> NoReturn:
    """Ends the command for words that its verb does not know, with what may have been meant."""
    verb, further = verbs.choices[words[0]], iter(words[1:])
    # bench is called with a verb of its own or with none
    while (inner := _verbs(verb)) is not None and (named := next(filter(inner.choices.__contains__, further), None)):
        verb = inner.choices[named]
    similar = _similar(unknown[0], [flag for action in verb._actions for flag in action.option_strings])
    reason = reason_without(unknown[0].partition("=")[0].lstrip("-"))
    reason = reason or _FURTHER.get(words[0], "")
    hint = f"; did you mean {' or '.join(similar)}?" if similar else f"; {reason}" if reason else ""
    verb.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")


def in_full(words: list[str]) -> list[str]:
    """A command line with the verbs of other programs, such as ``pull``, as ours."""
    if words[0] == "help":
        words = [*words[1:], "--help"]
    return [*_SHORT.get(words[0], words[:1]), *words[1:]]


def _verbs(parser: argparse.ArgumentParser) -> argparse._SubParsersAction[argparse.ArgumentParser] | None:
    """The verbs of a parser; None: it has none."""
    return next((action for action in parser._actions if isinstance(action, argparse._SubParsersAction)), None)


_SHORT = {
    "pull": ["model", "fetch"],
    "list": ["model", "list"],
    "ls": ["model", "list"],
    "show": ["model", "show"],
    "rm": ["model", "rm"],
    "quantize": ["model", "quantize"],
}
"""Verbs of other programs that are two words here."""
_INSTEAD = {
    "run-batch": "`sapwood batch run FILE` has a router answer it",
    "launch": "`sapwood up` starts a server",
    "version": "`sapwood --version` prints it",
    "benchmark": "`sapwood bench` measures one",
    "create": "`sapwood up FILE.gguf` or a folder serves it as it is",
    "embed": "POST /v1/embeddings, or Client.embed in Python",
    "download": "`sapwood pull NAME` fetches a model",
    "models": "`sapwood list` shows the models that are here",
    "remove": "`sapwood rm NAME` removes a model",
    "delete": "`sapwood rm NAME` removes a model",
    "start": "`sapwood up` starts a server",
    "down": "`sapwood stop` ends a server",
    "kill": "`sapwood stop` ends a server",
    "restart": "`sapwood stop` ends a server, `sapwood up` starts one",
    "status": "`sapwood ps` lists the servers here, `sapwood top` shows one at work",
    "health": "`sapwood ps` lists the servers here, `sapwood doctor` says what is missing",
    "check": "`sapwood doctor` says what is missing",
    "info": "`sapwood show NAME` describes a model, `sapwood doctor` this machine",
    "inspect": "`sapwood show NAME` describes a model, `sapwood doctor` this machine",
    "convert": "`sapwood quantize IN OUT.gguf` writes a .gguf file",
    "complete": "`sapwood generate TEXT` continues a text",
    "ask": "`sapwood generate TEXT` asks one question, `sapwood chat` holds a conversation",
    "encode": "`sapwood tokenize TEXT` shows a text's tokens",
    "load": "`sapwood up MODEL` serves a model, `sapwood lora load` loads an adapter",
    "push": "models are fetched only: `sapwood pull NAME`",
    "explain": "`sapwood router route explain` says where a request would go",
}
"""Verbs of other programs that are none here, and what to do."""


_FURTHER = {
    "run": "the model comes first, without a flag; `sapwood up` has the flags of the services",
    "chat": "`sapwood run MODEL` starts a model and talks to it, `sapwood generate TEXT` asks one question",
    "generate": "the text stands without a flag, in quotes if it is several words",
    "tokenize": "the text stands without a flag, in quotes if it is several words",
    "model": "`sapwood model --help` says what each of its verbs takes",
    "worker": "--worker HOST:PORT says which one",
    "cache": "--worker HOST:PORT says which one",
}
"""What a verb takes instead of words or flags that are nothing like its own."""
_FLAGS = {
    "-p": "--port", "-n": "--max-tokens", "--router": "--address", "--server": "--address", "--url": "--address",
    "--output": "--json", "--out": "--json", "--output-file": "--json", "--num-prompts": "--requests", "--request-rate": "--rate",
    "--max-concurrency": "--concurrency", "--dataset-name": "--dataset", "--dataset-path": "--data", "--base-url": "--url",
    "--random-input-len": "--input-tokens", "--random-output-len": "--output-tokens",
}  # fmt: skip
"""Flags of other programs and services that other verbs call otherwise."""


def _similar(word: str, flags: list[str]) -> list[str]:
    """The flags that may have been meant: what the word is called here, services' flags of this name, else one spelt alike."""
    name = word.partition("=")[0].replace(".", "-").replace("_", "-")
    if not name.startswith("-"):
        return []
    addresses: list[str] = [flag for flag in ("--worker", "--grpc") if flag in flags]
    if name == "--address" and addresses:
        return addresses
    if _FLAGS.get(name) in flags:
        return [_FLAGS[name]]
    if known := [flag for flag in flag_of_others(name.lstrip("-")) if flag in flags]:
        return known
    of_services = [f"--{service}{name[1:]}" for service in ("router", "tokenizer", "worker")]
    return [flag for flag in flags if flag in of_services] or difflib.get_close_matches(name, flags, n=1, cutoff=0.8)


if __name__ == "__main__":
    sys.exit(main())
