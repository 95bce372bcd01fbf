"""`sapwood bench offline`: how much an engine in this process computes."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sapwood.cli.errors import EXIT_CODES, FAILED, INTERRUPTED, REFUSED, CliError
from sapwood.cli.measure.data import add_data_flags, sampling_of, source_of
from sapwood.cli.measure.target import run_fast
from sapwood_common.settings.flags import whole_number

if TYPE_CHECKING:
    from sapwood.bench.benchmark import LevelResult
    from sapwood.bench.data.source import Source

_DESCRIPTION = """\
Starts an engine of its own on a model (sapwood.Engine: no port, no network), asks it everything at once and prints how many
tokens a second it reads and writes.
"""


def configure(actions: Any) -> None:
    """Adds the verb to those of `sapwood bench`."""
    parser: argparse.ArgumentParser = actions.add_parser(
        "offline",
        help="an engine in this process instead of a server: how much it computes",
        description=_DESCRIPTION,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    engine = parser.add_argument_group("which engine")
    engine.add_argument("--model", default="demo", metavar="NAME", help="As for `sapwood up`. [default: demo]")
    engine.add_argument("--workers", type=whole_number(1), default=1, metavar="N", help="Of the model. [default: 1]")
    engine.add_argument(
        "--set",
        action="append",
        default=[],
        type=_setting,
        metavar="NAME=VALUE",
        help="A setting of its services (docs/configuration.md), such as max_running=8; repeatable. [default: none]",
    )
    load = parser.add_argument_group("how much")
    load.add_argument("--requests", type=whole_number(1), default=100, metavar="N", help="All at once. [default: 100]")
    load.add_argument(
        "--warm-up", type=whole_number(0), default=4, metavar="N", help="Requests before, not measured. [default: 4]"
    )
    add_data_flags(parser.add_argument_group("what is asked"))
    parser.add_argument("--json", metavar="FILE", help="All figures as JSON; - for standard output. [default: none]")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb; returns the exit code, raises CliError."""
    from sapwood.bench.data.json_lines import DataError
    from sapwood.bench.report import level_json, level_lines
    from sapwood.errors import InvalidArgumentError, SapwoodError

    try:
        source = source_of(arguments)
        source.check("completions")
        found = run_fast(_measure(arguments, source))
    except DataError as error:
        raise CliError(str(error), REFUSED) from None
    except SapwoodError as error:
        wrong = isinstance(error, InvalidArgumentError)
        raise CliError(error.message, REFUSED if wrong else FAILED) from None
    except ModuleNotFoundError as error:
        raise CliError(str(error), REFUSED) from None
    if found is None:
        return INTERRUPTED
    settings = dict(arguments.set)
    report = {"model": arguments.model, "workers": arguments.workers, "settings": settings, **level_json(found)}
    try:
        if arguments.json == "-":
            print(json.dumps(report, indent=1))
        else:
            print("\n".join(level_lines(found, None)))
            if arguments.json:
                Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise CliError(f"cannot write {error.filename}: {error.strerror}", FAILED) from None
    if found.run.interrupted:
        return INTERRUPTED
    return 0 if found.measures.succeeded else FAILED


async def _measure(arguments: argparse.Namespace, source: Source) -> LevelResult | None:
    """The load; None if it was interrupted before it began."""
    import sapwood
    from sapwood.bench.benchmark import Level, LevelResult, tokens_a_word
    from sapwood.bench.load import Load
    from sapwood.bench.measures import measure
    from sapwood.bench.offline import EngineTarget
    from sapwood.bench.stopping import unless_stopped

    engine = sapwood.AsyncEngine(arguments.model, workers=arguments.workers, **dict(arguments.set))
    target = EngineTarget(engine.generate, sampling_of(arguments, source))
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    def load(requests: int, seed: int, words: float | None) -> Load:
        conversations = source.open("completions", words or 1.0, seed)
        return Load(target, conversations, "completions", requests=requests, keep_texts=source.expects_json)

    async def prepare() -> float | None:
        await engine.start()
        words = await tokens_a_word(target)
        if arguments.warm_up:
            await load(arguments.warm_up, -1, words).closed(arguments.warm_up)
        return words

    try:
        words = await unless_stopped(prepare(), stop)
        if stop.is_set():
            return None
        measured = load(arguments.requests, arguments.seed, words)
        stopping = asyncio.create_task(stop.wait())
        stopping.add_done_callback(lambda _: measured.stop())
        run = await measured.closed(arguments.requests)
        level = Level("concurrency", arguments.requests)
        return LevelResult(level, run, measure(run, expects_json=source.expects_json))
    finally:
        await engine.close()


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
