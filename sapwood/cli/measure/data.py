"""Shared by `bench` and `bench offline`: the flags that say what is asked."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sapwood.cli.measure.target import json_object
from sapwood_common.settings.flags import number, whole_number

if TYPE_CHECKING:  # at run time only where they are used: they need the extra `bench`
    from sapwood.bench.data.source import Source
    from sapwood.bench.targets.target import Sampling


def add_data_flags(group: argparse._ArgumentGroup) -> None:
    """Adds the flags."""
    group.add_argument(
        "--dataset",
        choices=("random", "shared-prefix", "multi-turn", "json-schema", "sharegpt", "file"),
        default="random",
        help="random: words; shared-prefix: groups of prompts that begin alike; multi-turn: conversations that grow; "
        "json-schema: answers must match a schema; sharegpt, file: from --data. [default: random]",
    )
    group.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help="Of sharegpt a file in ShareGPT's format; of file JSON lines with prompt or messages, and with max_tokens and "
        "json_schema if wanted. [default: none]",
    )
    for flag, default, text in (
        ("--input-tokens", "128", "Tokens of a prompt or a turn, about: N, or a range A-B"),
        ("--output-tokens", "32", "Most tokens of an answer: N, or A-B"),
        ("--prefix-tokens", "512", "Of shared-prefix: tokens that a group's prompts have in common"),
        ("--turns", "4", "Of multi-turn and sharegpt: turns of a conversation, N or A-B"),
    ):
        group.add_argument(flag, type=_lengths, default=default, metavar="N", help=f"{text}. [default: {default}]")
    group.add_argument(
        "--groups", type=whole_number(1), default=8, metavar="N", help="Of shared-prefix: how many. [default: 8]"
    )
    group.add_argument(
        "--schema", type=Path, metavar="FILE", help="Of json-schema: the schema. [default: a small record]"
    )
    group.add_argument(
        "--block-tokens", type=whole_number(1), default=512, metavar="N", help="Of a trace's hash_ids. [default: 512]"
    )
    group.add_argument(
        "--token-ids",
        type=_token_ids,
        metavar="A-B",
        help="Prompts are token ids of this range, so that their lengths are exact. [default: words]",
    )
    group.add_argument("--temperature", type=number, default=0.0, metavar="T", help="Of all requests. [default: 0]")
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="Answers have all their tokens. Not every server knows it. [default: yes with random, shared-prefix, --trace]",
    )
    group.add_argument(
        "--seed", type=whole_number(0), default=0, metavar="N", help="The same seed, the same load. [default: 0]"
    )


def source_of(arguments: argparse.Namespace, trace: Path | None = None) -> Source:
    """The data that the flags name; a trace takes its lengths from its file. Raises DataError."""
    from sapwood.bench.data.json_lines import DataError, read_text
    from sapwood.bench.data.source import Source
    from sapwood.bench.data.trace import read_trace

    schema = None
    if arguments.schema is not None:
        try:
            schema = json_object(read_text(arguments.schema))
        except argparse.ArgumentTypeError:
            raise DataError(f"--schema: {arguments.schema} holds no JSON object") from None
    return Source(
        dataset=arguments.dataset,
        inputs=arguments.input_tokens,
        outputs=arguments.output_tokens,
        groups=arguments.groups,
        prefix=arguments.prefix_tokens,
        turns=arguments.turns,
        schema=schema,
        path=arguments.data,
        trace=() if trace is None else tuple(read_trace(trace)),
        block_tokens=arguments.block_tokens,
        token_ids=arguments.token_ids,
    )


def sampling_of(arguments: argparse.Namespace, source: Source, body: dict[str, Any] | None = None) -> Sampling:
    """What all requests have in common, with further fields of the body over HTTP."""
    from sapwood.bench.targets.target import Sampling

    ignore_eos = source.prescribes_lengths if arguments.ignore_eos is None else arguments.ignore_eos
    return Sampling(arguments.temperature, ignore_eos, body)


def _lengths(text: str) -> Any:
    from sapwood.bench.data.lengths import Lengths

    try:
        return Lengths.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _token_ids(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    try:
        least, most = int(low), int(high)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no range such as 1000-30000") from None
    if not 0 <= least <= most:
        raise argparse.ArgumentTypeError(f"{text!r}: a range goes up, from at least 0")
    return least, most
