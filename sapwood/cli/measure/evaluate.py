"""`sapwood eval`: accuracy of a served model on tasks from files."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sapwood.cli.errors import EXIT_CODES, FAILED, INTERRUPTED, CliError
from sapwood.cli.measure.target import add_target_flags, run_fast, telling_errors, where_of
from sapwood.cli.top import table
from sapwood_common.settings.flags import whole_number

if TYPE_CHECKING:
    from sapwood.bench.targets.open_target import Where
    from sapwood.evaluation.evaluate import Evaluation, Scored
    from sapwood.evaluation.figures import Accuracy
    from sapwood.evaluation.items import Item

_DESCRIPTION = """\
Asks a server the questions in files and prints the share of right answers of each task, with its standard error.

Files of MMLU, ARC, HellaSwag and GSM8K are read as they are published. Others have JSON lines.
The likeliest of some answers, by the probabilities of their tokens (--api completions):
  {"task": "capitals", "prompt": "The capital of France is", "choices": ["Rome", "Paris"], "answer": "Paris"}
An answer that is generated, and compared whole or cut out by an expression:
  {"prompt": "2 + 3 =", "answer": "5", "max_tokens": 8, "stop": "\\n", "extract": "-?[0-9]+"}
  {"prompt": "Name a colour.", "match": "regex", "answer": "(?i)red|green|blue"}
"""


def configure(verbs: Any) -> None:
    """Adds the verb to the parser."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        "eval",
        help="how often a served model answers right",
        description=_DESCRIPTION,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="items of tasks")
    add_target_flags(parser)
    parser.add_argument(
        "--shots",
        type=whole_number(0),
        default=0,
        metavar="N",
        help="The first items of each task are shown with their answers before the others, unscored. [default: 0]",
    )
    parser.add_argument("--limit", type=whole_number(1), metavar="N", help="No more items of each file. [default: all]")
    parser.add_argument(
        "--concurrency", type=whole_number(1), default=8, metavar="N", help="Requests at a time. [default: 8]"
    )
    parser.add_argument(
        "--max-tokens",
        type=whole_number(1),
        default=64,
        metavar="N",
        help="For items that do not set it. [default: 64]",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="The figures as JSON; - for standard output instead of a table. [default: none]"
    )
    parser.add_argument("--records", metavar="FILE", help="Every item's answer as a line of JSON. [default: none]")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb; returns the exit code, raises CliError."""
    where = where_of(arguments)
    from sapwood.evaluation.figures import accuracies
    from sapwood.evaluation.items import read_items

    with telling_errors():
        items = [item for path in arguments.files for item in read_items(path, arguments.max_tokens)[: arguments.limit]]
        evaluation = run_fast(_evaluate(where, items, arguments))
    found = accuracies(evaluation.scored)
    report = {
        "target": str(where),
        "model": evaluation.model,
        "shots": arguments.shots,
        "interrupted": evaluation.stopped,
        "tasks": {name: dataclasses.asdict(accuracy) for name, accuracy in found.items()},
    }
    try:
        if arguments.json == "-":
            print(json.dumps(report, indent=1))
        else:
            print("\n".join(table(_rows(found))))
            if arguments.json:
                Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        if arguments.records:
            lines = "".join(f"{json.dumps(_record(each))}\n" for each in evaluation.scored)
            Path(arguments.records).write_text(lines, encoding="utf-8")
    except OSError as error:
        raise CliError(f"cannot write {error.filename}: {error.strerror}", FAILED) from None
    for name, accuracy in found.items():
        if accuracy.failed:
            print(f"sapwood: {name}: {accuracy.failed} failed: {accuracy.error}", file=sys.stderr)
    if evaluation.stopped:
        return INTERRUPTED
    return FAILED if any(accuracy.failed for accuracy in found.values()) else 0


async def _evaluate(where: Where, items: list[Item], arguments: argparse.Namespace) -> Evaluation:
    from sapwood.bench.targets.open_target import open_target
    from sapwood.bench.targets.target import Sampling
    from sapwood.evaluation.evaluate import Evaluation

    live = sys.stderr.isatty()

    def on_progress(done: int, of: int) -> None:
        if live:
            print(f"\r{done} of {of}", end="\n" if done == of else "", file=sys.stderr, flush=True)

    target = open_target(where, Sampling())
    try:
        evaluation = Evaluation(
            target,
            where.api_used,
            shots=arguments.shots,
            concurrency=arguments.concurrency,
            on_progress=on_progress,
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, evaluation.stop)
        await evaluation.run(items)
    finally:
        await target.close()
    return evaluation


def _rows(found: dict[str, Accuracy]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("TASK", "ITEMS", "ACCURACY", "STANDARD ERROR", "BY LENGTH", "FAILED")]
    for name, each in found.items():
        shares = (each.accuracy, each.standard_error, each.accuracy_by_length)
        rows.append(
            (name, str(each.items), *("-" if share is None else f"{share:.3f}" for share in shares), str(each.failed))
        )
    return rows


def _record(scored: Scored) -> dict[str, Any]:
    fields = dataclasses.asdict(scored)
    return {"item": fields.pop("item"), **fields}
