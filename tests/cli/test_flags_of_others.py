"""Flags of SGLang's server and of ``vllm serve``: each has its counterpart here, or a reason why there is none."""

from __future__ import annotations

import argparse
import itertools

import pytest

from sapwood.cli import flags_of_others
from sapwood.cli.flags_of_others import flag_of_others, of_sglang, reason_without
from sapwood.cli.main import build_parser, main


@pytest.fixture(scope="module")
def flags_of_up() -> set[str]:
    parser = build_parser("up")
    [verbs] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return {flag for action in verbs.choices["up"]._actions for flag in action.option_strings}


def test_every_counterpart_is_a_flag_of_up(flags_of_up: set[str]) -> None:
    for row in of_sglang():
        assert set(row.ours) <= flags_of_up, row.ours
    assert set(flags_of_others._MORE.values()) <= flags_of_up


def test_each_flag_of_sglang_is_there_once_with_a_counterpart_or_a_reason() -> None:
    rows = of_sglang()
    flags = list(itertools.chain.from_iterable(row.flags for row in rows))
    assert len(flags) == len(set(flags)) > 500
    assert all(row.ours or row.why for row in rows)


@pytest.mark.parametrize(
    ("flag", "ours"),
    [("tp-size", "--tensor-parallel"), ("max-model-len", "--worker-context-length"), ("no-such-flag", None)],
)
def test_a_flags_counterpart_is_found_by_its_name(flag: str, ours: str | None) -> None:
    assert flag_of_others(flag) == (() if ours is None else (ours,))


def test_a_flag_without_a_counterpart_is_answered_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["up", "--trust-remote-code"])
    assert "unrecognized arguments: --trust-remote-code; not there: a model's own Python" in capsys.readouterr().err
    assert reason_without("tp-size") == reason_without("no-such-flag") == ""
