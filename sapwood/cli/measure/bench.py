"""`sapwood bench`: load on a server, and what it feels like to its clients."""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib.util
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sapwood.cli.errors import EXIT_CODES, FAILED, INTERRUPTED, REFUSED, CliError
from sapwood.cli.measure import compare, offline
from sapwood.cli.measure.bench_view import BenchView
from sapwood.cli.measure.data import add_data_flags, sampling_of, source_of
from sapwood.cli.measure.target import (
    add_target_flags,
    allow_many_connections,
    json_object,
    positive,
    run_fast,
    telling_errors,
    where_of,
)
from sapwood_common.settings.flags import whole_number

if TYPE_CHECKING:  # at run time only where they are used: they need the extra `bench`
    from sapwood.bench.benchmark import Benchmark, Level, Plan, Result

_DESCRIPTION = """\
Puts load on a server and prints what its clients feel: time to first token, time between tokens, throughput, errors.

Any server with OpenAI's API will do, and Sapwood's gRPC; what `sapwood up` starts is asked by default.
"""
_EXAMPLES = """\
examples:
  sapwood bench                                     8 clients at a time, 100 requests
  sapwood bench --concurrency 1,4,16 --html b.html  how it grows with more of them, as a page
  sapwood bench --rate 5 --seconds 60               5 requests a second, come what may
  sapwood bench --dataset multi-turn --api chat     conversations that grow
  sapwood bench --slo ttft=500ms,itl=50ms           how many requests a second are good ones
  sapwood bench --url https://api.example.com/v1 --model NAME

Ctrl-C prints what was measured until then.

"""


def configure(verbs: Any) -> None:
    """Adds the verb to the parser."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        "bench",
        usage="sapwood bench [FLAG ...]\n       sapwood bench offline [FLAG ...]",
        help="put load on a server and measure it",
        description=_DESCRIPTION,
        epilog=_EXAMPLES + EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_target_flags(parser)
    _add_load_flags(parser.add_argument_group("how much"))
    data = parser.add_argument_group("what is asked")
    add_data_flags(data)
    data.add_argument(
        "--body", type=json_object, metavar="JSON", help="Further fields of each request, over HTTP. [default: none]"
    )
    _add_report_flags(parser.add_argument_group("report"))
    parser.set_defaults(run=run)
    others = parser.add_subparsers(title="instead of a server", metavar="WHAT", prog="sapwood bench")
    offline.configure(others)
    compare.configure(others)


def _add_load_flags(group: argparse._ArgumentGroup) -> None:
    loads = group.add_mutually_exclusive_group()
    loads.add_argument(
        "--concurrency",
        type=_several(whole_number(1)),
        metavar="N[,N...]",
        help="So many clients, each with one request at a time; several numbers are measured one after the other. [default: 8]",
    )
    loads.add_argument(
        "--rate",
        type=_several(positive),
        metavar="R[,R...]",
        help="So many requests a second, or multi-turn conversations, which wait for no answer. [default: --concurrency]",
    )
    loads.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="Requests at the times and of the lengths in FILE, JSON lines with timestamp (ms), input_length, output_length and "
        "hash_ids, as Mooncake's. [default: --concurrency]",
    )
    group.add_argument(
        "--arrivals",
        choices=("poisson", "constant"),
        default="poisson",
        help="How a rate is spread. [default: poisson]",
    )
    group.add_argument(
        "--trace-speed", type=positive, default=1.0, metavar="X", help="How much faster than it was. [default: 1]"
    )
    group.add_argument(
        "--requests",
        type=whole_number(1),
        metavar="N",
        help="Of each load. [default: 100; no limit with --seconds or --trace]",
    )
    group.add_argument(
        "--seconds",
        type=positive,
        metavar="S",
        help="Of each load; what is under way is waited for. [default: no limit]",
    )
    group.add_argument(
        "--warm-up", type=whole_number(0), default=4, metavar="N", help="Requests before, not measured. [default: 4]"
    )


def _add_report_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--slo",
        type=_slo,
        metavar="ttft=200ms,...",
        help="What a good request keeps, of ttft, itl (each gap), tpot and e2e; goodput counts those. [default: none]",
    )
    for flag, text in (
        ("--json", "All figures as JSON; - for standard output instead of lines."),
        ("--records", "Every request as a line of JSON."),
        ("--plot", "A picture, PNG."),
        ("--html", "A page with tables and picture, which needs nothing next to it."),
    ):
        group.add_argument(flag, metavar="FILE", help=f"{text} [default: none]")


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb; returns the exit code, raises CliError."""
    plan = _plan(arguments)
    if (arguments.plot or arguments.html) and importlib.util.find_spec("matplotlib") is None:
        raise CliError("--plot and --html need more packages: pip install 'sapwood[bench]'", REFUSED)
    to_standard_output = arguments.json == "-"
    view = BenchView(sys.stderr)
    from sapwood.bench.benchmark import Benchmark, LevelResult
    from sapwood.bench.report import level_lines

    def show(found: LevelResult) -> None:
        view.clear()
        if not to_standard_output:
            print("\n".join(level_lines(found, plan.slo)), flush=True)

    def on_progress(level: Level, load: Any) -> None:
        view.show(level, load)

    benchmark = Benchmark(plan, on_progress=on_progress, on_level=show)
    try:
        result = _run(benchmark)
    finally:
        view.clear()
    _report(result, arguments, to_standard_output)
    if result.interrupted:
        return INTERRUPTED
    return FAILED if any(found.measures.succeeded == 0 for found in result.levels) else 0


def _run(benchmark: Benchmark) -> Result:
    """Runs it until its end or Ctrl-C."""
    allow_many_connections()
    gc.collect()
    gc.freeze()  # the collector then only looks at what the loads make

    async def main() -> Result:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, benchmark.stop)
        return await benchmark.run()

    with telling_errors():
        return run_fast(main())


def _report(result: Result, arguments: argparse.Namespace, to_standard_output: bool) -> None:
    from sapwood.bench.report import record_json, sweep_lines, to_json

    if len(result.levels) > 1 and not to_standard_output:
        print()
        print("\n".join(sweep_lines(result)))
    try:
        if to_standard_output:
            print(json.dumps(to_json(result), indent=1))
        elif arguments.json:
            Path(arguments.json).write_text(json.dumps(to_json(result), indent=1) + "\n", encoding="utf-8")
        if arguments.records:
            lines = [json.dumps(record_json(found, record)) for found in result.levels for record in found.run.records]
            Path(arguments.records).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        if arguments.plot and result.levels:
            from sapwood.bench.plots import write_png

            write_png(result, Path(arguments.plot))
        if arguments.html and result.levels:
            from sapwood.bench.page import write_page

            write_page(result, Path(arguments.html))
    except OSError as error:
        raise CliError(f"cannot write {error.filename}: {error.strerror}", FAILED) from None


def _plan(arguments: argparse.Namespace) -> Plan:
    where = where_of(arguments)
    from sapwood.bench.benchmark import Level, Plan
    from sapwood.bench.data.json_lines import DataError

    levels: tuple[Level, ...]
    if arguments.trace is not None:
        levels = (Level("trace", arguments.trace_speed),)
    elif arguments.rate is not None:
        arriving: Literal["requests", "conversations"] = (
            "conversations" if arguments.dataset in ("multi-turn", "sharegpt") else "requests"
        )
        levels = tuple(Level("rate", value, arriving) for value in arguments.rate)
    else:
        levels = tuple(Level("concurrency", value) for value in arguments.concurrency or (8,))
    try:
        source = source_of(arguments, arguments.trace)
        source.check(where.api_used)
    except DataError as error:
        raise CliError(str(error), REFUSED) from None
    if where.url is None and arguments.body:
        raise CliError("--body is for --url", REFUSED)
    requests = arguments.requests
    if requests is None and arguments.seconds is None and arguments.trace is None:
        requests = 100
    return Plan(
        where=where,
        source=source,
        levels=levels,
        sampling=sampling_of(arguments, source, arguments.body),
        requests=requests,
        seconds=arguments.seconds,
        arrivals=arguments.arrivals,
        warm_up=arguments.warm_up,
        seed=arguments.seed,
        slo=arguments.slo,
    )


def _several(parse: Callable[[str], float]) -> Callable[[str], tuple[float, ...]]:
    def parse_all(text: str) -> tuple[float, ...]:
        return tuple(parse(part) for part in text.split(","))

    return parse_all


def _slo(text: str) -> Any:
    from sapwood.bench.slo import Slo

    try:
        return Slo.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
