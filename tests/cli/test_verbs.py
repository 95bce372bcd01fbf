"""`sapwood generate` and `sapwood chat` as a shell sees them: output, one line of error, exit code."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from sapwood.cli import errors as exit_codes
from sapwood.cli.main import build_parser, main
from sapwood.v1 import common_pb2, router_pb2
from sapwood_common import errors


def test_generate_prints_the_text(router: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--address", router.address, "--max-tokens", "3", "--seed", "1", "Hi"]) == 0
    assert capsys.readouterr().out == "Hello, world\n"
    assert router.requests[0].sampling.max_tokens == 3


def test_no_verb_shows_what_verbs_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == exit_codes.REFUSED
    assert "start tokenizer, workers and router here" in capsys.readouterr().err


def test_generate_reads_standard_input(
    router: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert main(["generate", "--address", router.address, "-"]) == 0
    assert router.requests[0].text == "from a pipe"


def test_generate_as_json_is_an_object_a_line(router: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--address", router.address, "--json", "Hi"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert "".join(line["text"] for line in lines) == "Hello, world"
    assert lines[-1]["finish_reason"] == "stop"
    drafts = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    assert lines[-1]["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "cached_tokens": 4,
        "reasoning_tokens": 0,
        **drafts,
    }


@pytest.mark.parametrize(
    ("error", "exit_code", "message"),
    [
        (errors.InvalidArgumentError("too hot", field="sampling.temperature"), 2, "(sampling.temperature): too hot"),
        (errors.NotFoundError("no such model", field="model"), 2, "NOT_FOUND (model): no such model"),
        (errors.UnavailableError("no worker"), 3, "UNAVAILABLE: no worker"),
        (errors.DeadlineExceededError("too late"), 3, "DEADLINE_EXCEEDED: too late"),
        (errors.InternalError("oh"), 1, "INTERNAL: oh (request made-here)"),
    ],
)
def test_an_error_is_one_line_with_its_exit_code(
    router: Any, capsys: pytest.CaptureFixture[str], error: errors.SapwoodError, exit_code: int, message: str
) -> None:
    router.error = error
    assert main(["generate", "--address", router.address, "Hi"]) == exit_code
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


def test_a_wrong_address_is_told_from_a_router_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    web = f"127.0.0.1:{server.server_port}"
    try:
        wrong, away = exit_codes.REFUSED, exit_codes.UNREACHABLE
        for address, code, problem in (
            (f"http://{web}/v1", wrong, f"--address: http://{web}/v1 is a URL; this takes the router's gRPC address"),
            (web, away, f"{web} speaks HTTP; this takes the router's gRPC port\n"),
            ("::::", wrong, "--address: '::::' is not HOST:PORT, such as 127.0.0.1:50051\n"),
        ):
            assert main(["generate", "--address", address, "Hi"]) == code
            assert problem in capsys.readouterr().err
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("verb", "hint"), [("generat", "did you mean generate?"), ("xyz", "`sapwood --help` lists them")]
)
def test_a_verb_that_is_not_there(capsys: pytest.CaptureFixture[str], verb: str, hint: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    assert ended.value.code == exit_codes.REFUSED
    assert f"there is no verb {verb!r}; {hint}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ("worker", "flush", "--address", "x"),
            "sapwood worker flush: error: unrecognized arguments: --address x; did you mean --worker?",
        ),
        (
            ("router", "workers", "list", "--adress", "x"),
            "sapwood router workers list: error: unrecognized arguments: --adress x; did you mean --address?",
        ),
        (("bench", "--modle=x"), "sapwood bench: error: unrecognized arguments: --modle=x; did you mean --model?"),
    ],
)
def test_an_unknown_flag_is_told_with_the_flags_of_its_own_verb(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words])
    assert ended.value.code == exit_codes.REFUSED
    assert problem in capsys.readouterr().err


def test_any_sampling_field_can_be_set_by_its_name(router: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fields = ("presence_penalty=0.5", 'logit_bias={"5": -1}')
    assert main(["generate", "--address", router.address, "--sampling", fields[0], "--sampling", fields[1], "Hi"]) == 0
    assert router.requests[0].sampling == common_pb2.SamplingParams(presence_penalty=0.5, logit_bias={5: -1})
    for wrong in ("nothing=1", "min_p=high", "min_p", "n=2"):
        assert main(["generate", "--address", router.address, "--sampling", wrong, "Hi"]) == exit_codes.REFUSED
        shown = capsys.readouterr().err
        assert "--sampling" in shown and shown.count("\n") == 1


def test_text_that_is_not_utf8_is_refused(router: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--address", router.address, "\udcff"]) == exit_codes.REFUSED
    assert "wrong value" in capsys.readouterr().err
    assert router.requests == []


def test_a_wrong_variable_is_reported_like_a_wrong_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SAPWOOD_UP_WORKERS", "0")
    with pytest.raises(SystemExit) as caught:
        main(["up"])
    assert caught.value.code == 2
    assert "--workers: 0 is not at least 1" in capsys.readouterr().err


def test_a_flag_wins_over_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAPWOOD_UP_WORKERS", "3")
    assert build_parser().parse_args(["up"]).workers == 3
    assert build_parser().parse_args(["up", "--workers", "4"]).workers == 4


def test_piped_chat_sends_the_whole_conversation_each_turn(
    router: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n/reset\nthree\n/exit\nnever\n"))
    assert main(["chat", "--address", router.address, "--system", "Be kind."]) == 0
    turns = [[(turn.role, turn.content) for turn in request.messages.messages] for request in router.requests]
    system = ("system", "Be kind.")
    assert turns == [
        [system, ("user", "one")],
        [system, ("user", "one"), ("assistant", "Hello, world"), ("user", "two")],
        [system, ("user", "three")],
    ]
    assert router.requests[0].sampling.max_tokens == 512
    assert capsys.readouterr().out == "Hello, world\n" * 3


def test_piped_chat_ends_at_the_first_error(
    router: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    router.error = errors.UnavailableError("no worker")
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    assert main(["chat", "--address", router.address]) == exit_codes.UNREACHABLE
    assert len(router.requests) == 1


def test_a_reader_that_has_enough_is_no_error(router: Any) -> None:
    generate = f"{sys.executable} -m sapwood.cli.main generate --address {router.address} --json Hi"
    command = ["bash", "-c", f"{generate} | true; echo ${{PIPESTATUS[0]}}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_an_answers_schema_and_tools_come_from_files(
    router: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    schema, tools = tmp_path / "schema.json", tmp_path / "tools.json"
    schema.write_text('{"type": "array"}')
    tools.write_text('[{"type": "function", "function": {"name": "f"}}]')
    assert main(["generate", "--address", router.address, "--json-schema", str(schema), "Hi"]) == 0
    assert main(["generate", "--address", router.address, "--json-schema", "-", "Hi"]) == 0
    assert main(["generate", "--address", router.address, "--regex", "a+", "Hi"]) == 0
    call = common_pb2.ToolCallDelta(index=0, id="c0", name="f", arguments='{"a": 1}')
    router.extra = (router_pb2.RouterGenerateResponse(tool_calls=[call]),)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\nthe tool gave this\n"))
    command = ["chat", "--address", router.address, "--tools", str(tools), "--tool-choice", "required"]
    assert main(command) == 0
    assert '[f] {"a": 1}' in capsys.readouterr().out
    grammars = [request.grammar for request in router.requests[:3]]
    assert [grammar.json_schema for grammar in grammars[:2]] == ['{"type": "array"}', '{"type": "object"}']
    assert grammars[2].regex == "a+"
    first, second = router.requests[3:]
    assert json.loads(first.tools)[0]["function"] == {"name": "f"}
    assert first.tool_choice == router_pb2.TOOL_CHOICE_REQUIRED
    _, answer, given = second.messages.messages
    assert answer.tool_calls[0].arguments == '{"a": 1}'
    assert (given.role, given.tool_call_id, given.content) == ("tool", "c0", "the tool gave this")


@pytest.mark.parametrize(("content", "message"), [(None, "cannot read"), ("{", "is not JSON"), ("{}", "no JSON array")])
def test_a_file_that_is_of_no_use_is_named(
    router: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, message: str
) -> None:
    tools = tmp_path / "tools.json"
    if content is not None:
        tools.write_text(content)
    assert main(["chat", "--address", router.address, "--tools", str(tools)]) == exit_codes.REFUSED
    error = capsys.readouterr().err
    assert message in error
    assert "tools.json" in error


@pytest.mark.parametrize("verb", [["top"], ["router", "top"]])
def test_top_shows_workers_load_hits_rates_and_breakers(
    router: Any, capsys: pytest.CaptureFixture[str], verb: list[str]
) -> None:
    assert main([*verb, "--once", "--address", router.address]) == 0
    head, _, names, up, down = capsys.readouterr().out.splitlines()
    assert head == "up 65 s, policy least_load: 3 running, 2 queued, 42 tokens/s, 1 streams resumed"
    assert names.split()[0] == "WORKER"
    assert up.split() == ["a:1", "up", "demo", "3", "2", "1", "88%", "-", "closed", "42", "-"]
    assert down.startswith("b:2     down: it does not answer  -")
    assert down.split()[-3:] == ["open", "0", "-"]


def test_top_looks_again_and_again_until_it_is_interrupted(router: Any) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "sapwood.cli.main", "top", "--address", router.address, "--interval", "0.1"],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        seen = 0
        for line in process.stdout:
            seen += line.startswith("up 65 s")
            if seen == 3:
                process.send_signal(signal.SIGINT)
                break
        process.stdout.read()
    assert process.returncode == 0
