"""`sapwood chat`: a conversation in the terminal, or with one turn for each line of standard input."""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from sapwood.cli.errors import EXIT_CODES, REFUSED, UNREACHABLE, CliError
from sapwood.cli.request import (
    add_request_options,
    add_structure_options,
    failing_plainly,
    open_client,
    request_options,
    structure_options,
)
from sapwood.cli.terminal import harmless
from sapwood_common.models.packaged import model_hint

if TYPE_CHECKING:
    from sapwood.client import Client, Generation
    from sapwood.generation import Delta, Options, ToolCall

_HELP = "/reset forgets the conversation, /help lists more, /exit or Ctrl-D leaves, Ctrl-C stops an answer"
_COMMANDS = """/system TEXT  what the model reads first; the conversation begins again
/file PATH    the text of a file goes before the next question
/save PATH    writes the conversation as JSON, as the OpenAI API's "messages"
/reset        forgets the conversation
/exit         leaves, as does Ctrl-D
\"""           begins a text of several lines, which another \""" ends
Ctrl-C        stops an answer"""
_ALIASES = {"/quit": "/exit", "/bye": "/exit", "/clear": "/reset", "/?": "/help"}
"""Other programs' names of commands."""
_QUOTES = '"""'


def configure(verbs: Any) -> None:
    """Adds the verb to the parser."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        "chat",
        help="hold a conversation",
        description=f"A conversation: {_HELP}. Where standard input is no terminal, each of its lines is one turn.",
        epilog=EXIT_CODES,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--system", metavar="TEXT", help="System message, which the model reads first. [default: nothing]"
    )
    add_request_options(parser, max_tokens=512)
    add_structure_options(parser, tools=True)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, question: str = "") -> int:
    """Runs the verb; returns the exit code, raises CliError. ``question`` is asked instead of a conversation."""
    options: Options = {**request_options(arguments), **structure_options(arguments)}
    interactive = sys.stdin.isatty()
    with open_client(arguments) as client:
        conversation = Conversation(client, options, arguments.system)
        if question:
            conversation.ask(question)
            return 0
        if not interactive:
            for line in sys.stdin:
                if not _turn(conversation, line.strip()):
                    break
            return 0
        with failing_plainly(arguments.address):  # reports an unreachable router before the first question
            models = client.list_models()
        names = [arguments.model] if arguments.model else [model.id for model in models]
        print(f"{', '.join(names)}: {_HELP}")
        for name in names:
            if hint := model_hint(name):
                print(f"{name} is {hint}")
        _read_history()
        while True:
            try:
                line = _read("> ")
            except KeyboardInterrupt:
                print("\n/exit or Ctrl-D leaves")
                continue
            except EOFError:
                print()
                return 0
            try:
                if not _turn(conversation, line.strip()):
                    return 0
            except CliError as failure:
                print(f"sapwood: {harmless(failure.message)}", file=sys.stderr)
                if failure.exit_code == UNREACHABLE:
                    print("the conversation is kept: ask again once the router is back", file=sys.stderr)
    return 0


class Conversation:
    """Turns so far. A turn whose answer fails is forgotten; one that is stopped keeps what was said.

    Args:
        client: The connection to the router; not closed here.
        options: Sent with each turn.
        system: Sent before the first turn.
    """

    def __init__(self, client: Client, options: Options, system: str | None) -> None:
        self._client = client
        self._options = options
        self._start = [{"role": "system", "content": system}] if system else []
        self._messages: list[dict[str, Any]] = list(self._start)
        self._unanswered: tuple[ToolCall, ...] = ()
        self._attached: list[str] = []
        self._saved: set[Path] = set()

    def begin_with(self, system: str) -> None:
        """Forgets all turns, and sends this before the first one."""
        self._start = [{"role": "system", "content": system}] if system else []
        self.reset()

    def attach(self, path: str) -> None:
        """Puts a file's text before the next question. Raises CliError."""
        from sapwood_common.models.model_files import local_path

        try:
            text = local_path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise CliError(f"/file: cannot read {path}: {error.strerror}", REFUSED) from None
        except UnicodeDecodeError:
            raise CliError(f"/file: {path} is no text", REFUSED) from None
        self._attached.append(text)
        _note(f"{len(text)} characters go before the next question")

    def save(self, path: str) -> None:
        """Writes all turns, to a new file or to one that this conversation was saved in. Raises CliError."""
        from sapwood_common.models.model_files import local_path

        file = local_path(path)
        try:
            with file.open("w" if file in self._saved else "x") as opened:
                opened.write(json.dumps(self._messages, ensure_ascii=False, indent=1) + "\n")
        except FileExistsError:
            raise CliError(f"/save: {path} is there already; name another file", REFUSED) from None
        except OSError as error:
            raise CliError(f"/save: cannot write {path}: {error.strerror}", REFUSED) from None
        self._saved.add(file)
        _note(f"{len(self._messages)} messages saved")

    def reset(self) -> None:
        """Forgets all turns."""
        self._messages = list(self._start)
        self._unanswered = ()
        self._attached = []
        _note("a new conversation begins")

    def ask(self, question: str) -> None:
        """Streams the answer to standard output; Ctrl-C stops it. Raises CliError.

        After an answer with tool calls, each of the next questions is the result of one call.
        """
        from sapwood.errors import CancelledError
        from sapwood.generation import answer_of

        turn: dict[str, Any] = {"role": "user", "content": "\n\n".join([*self._attached, question])}
        if self._unanswered:  # the line is the result of a tool call
            turn = {"role": "tool", "content": question, "tool_call_id": self._unanswered[0].id}
        asked = [*self._messages, turn]
        if len(self._unanswered) > 1:
            self._messages, self._unanswered = asked, self._unanswered[1:]
            print(f"{self._unanswered[0].name} gave? ", end="")
            return
        deltas: list[Delta] = []
        with (
            failing_plainly(self._client.address),
            self._client.generate(messages=asked, **self._options) as generation,
            _cancelled_by_ctrl_c(generation) as stopped,
        ):
            try:
                for delta in generation:
                    deltas.append(delta)
                    show(delta)
            except CancelledError:
                if not stopped.is_set():
                    raise
        print()
        self._attached = []
        answer = answer_of(deltas)
        self._unanswered = answer.tool_calls
        self._messages = [*asked, answer.message]


@contextmanager
def _cancelled_by_ctrl_c(generation: Generation) -> Iterator[threading.Event]:
    """On a terminal Ctrl-C cancels the answer and sets the event. A KeyboardInterrupt could interrupt grpcio while it updates the
    channel's state, after which the next call would wait for ever.
    """
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()
        generation.cancel()

    if not sys.stdin.isatty():
        yield stopped
        return
    before = signal.signal(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)


def show(delta: Delta) -> None:
    """Prints a piece of an answer; reasoning is dimmed on a terminal, and calls look like calls."""
    on_terminal = sys.stdout.isatty()
    printable = harmless if on_terminal else str
    if delta.reasoning:
        reasoning = printable(delta.reasoning)
        print(f"\033[2m{reasoning}\033[0m" if on_terminal else reasoning, end="", flush=True)
    print(printable(delta.text), end="", flush=True)
    for part in delta.tool_calls:
        print(printable(f"\n[{part.name}] " * bool(part.name) + part.arguments), end="", flush=True)


def _note(text: str) -> None:
    """Says on a terminal what was done."""
    if sys.stdout.isatty():
        print(text)


def _turn(conversation: Conversation, line: str) -> bool:
    """Takes one line; returns whether to continue."""
    command, _, rest = line.partition(" ")
    command, rest = _ALIASES.get(command, command), rest.strip()
    with_words: dict[str, Callable[[str], None]] = {
        "/system": conversation.begin_with,
        "/file": conversation.attach,
        "/save": conversation.save,
    }
    if command in with_words:
        if not rest and command != "/system":
            raise CliError(f"{command} takes a path: {command} PATH", REFUSED)
        with_words[command](rest)
    elif command in ("/exit", "/reset", "/help"):
        if rest:
            raise CliError(f"{command} takes nothing after it", REFUSED)
        if command == "/reset":
            conversation.reset()
        elif command == "/help":
            print(_COMMANDS)
        return command != "/exit"
    elif re.fullmatch(r"/[A-Za-z?]+", line) or get_close_matches(command, (*with_words, "/exit", "/reset", "/help"), 1):
        raise CliError(f"there is no command {command}; /help lists them", REFUSED)
    elif line:
        conversation.ask(line)
    return True


def _read(prompt: str) -> str:
    """A question from the terminal: one line, or several between triple quotes."""
    line = input(prompt)
    if not line.lstrip().startswith(_QUOTES):
        return line
    lines = [line.lstrip().removeprefix(_QUOTES)]
    while not lines[-1].rstrip().endswith(_QUOTES):
        lines.append(input(". "))
    lines[-1] = lines[-1].rstrip().removesuffix(_QUOTES)
    return "\n".join(lines)


def _read_history() -> None:
    """Gives ``input`` line editing and the questions of earlier conversations."""
    import atexit

    try:
        import readline
    except ImportError:  # some builds of Python have no readline; input() then edits as the terminal does
        return
    from sapwood_common.models.model_files import sapwood_home

    path: Path = sapwood_home() / "chat_history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        readline.read_history_file(path)
    except OSError:
        return
    readline.set_history_length(1000)
    atexit.register(readline.write_history_file, path)
