"""`sapwood chat` on a terminal: what a person types and sees."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# A session's leader owns the first terminal that it opens: then Ctrl-C reaches it.
_TAKE_TERMINAL = """
import os, sys
os.close(os.open(os.ttyname(0), os.O_RDWR))
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class Terminal:
    """A pseudo-terminal with the command on its other side."""

    def __init__(self, *flags: str, home: Path) -> None:
        self._side, other = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _TAKE_TERMINAL, "-m", "sapwood.cli.main", "chat", *flags],
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
            env={**os.environ, "SAPWOOD_HOME": str(home), "TERM": "dumb"},
        )
        os.close(other)
        self._shown = ""

    def type(self, text: str) -> None:
        os.write(self._side, text.encode())

    def see(self, text: str, *, pressed: str = "") -> None:
        """Reads on until the text appears after what was seen before. A key that is ``pressed`` is pressed again while nothing
        comes: readline forgets a Ctrl-C that comes before it waits for keys."""
        while text not in self._shown:
            while pressed and not select.select([self._side], [], [], 1.0)[0]:
                self.type(pressed)
            self._shown += os.read(self._side, 4096).decode()  # raises at the end: the text never came
        self._shown = self._shown.partition(text)[2]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._side)


@pytest.fixture
def terminal(router: Any, tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal("--address", router.address, home=tmp_path)
    yield terminal
    terminal.close()


def test_a_conversation(terminal: Terminal, router: Any, tmp_path: Path) -> None:
    terminal.see("> ")
    terminal.type("one\n")
    terminal.see("Hello, world")
    terminal.see("> ")
    terminal.type("/exit\n")
    assert terminal.process.wait(timeout=60) == 0
    assert [turn.content for turn in router.requests[0].messages.messages] == ["one"]
    assert "one" in (tmp_path / "chat_history").read_text()


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(terminal: Terminal, router: Any) -> None:
    router.hang = True
    terminal.see("> ")
    terminal.type("one\n")
    terminal.see("Hello, world")
    terminal.type("\x03")
    assert router.cancelled.wait(60)
    router.hang = False
    terminal.see("> ")
    terminal.type("two\n")
    terminal.see("Hello, world")
    terminal.see("> ")
    terminal.type("\x04")
    assert terminal.process.wait(timeout=60) == 0
    assert [turn.content for turn in router.requests[1].messages.messages] == ["one", "Hello, world", "two"]


def test_an_error_is_shown_and_the_conversation_goes_on(terminal: Terminal, router: Any) -> None:
    from sapwood_common.errors import ResourceExhaustedError

    terminal.see("> ")
    router.error = ResourceExhaustedError("the queue is full")
    terminal.type("one\n")
    terminal.see("RESOURCE_EXHAUSTED: the queue is full")
    router.error = None
    terminal.see("> ")
    terminal.type("two\n")
    terminal.see("Hello, world")
    terminal.see("> ")
    assert [turn.content for turn in router.requests[1].messages.messages] == ["two"]


def test_system_prompts_files_and_texts_of_several_lines(terminal: Terminal, router: Any, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("a note")
    terminal.see("> ")
    terminal.type("/system Be short.\n")
    terminal.see("a new conversation begins")
    terminal.see("> ")
    terminal.type(f"/file {tmp_path}/notes.txt\n")
    terminal.see("6 characters go before the next question")
    terminal.see("> ")
    terminal.type('"""one\n')
    terminal.see(". ")
    terminal.type('two"""\n')
    terminal.see("Hello, world")
    terminal.see("> ")
    for _ in range(2):  # its own file it may replace
        terminal.type(f"/save {tmp_path}/talk.json\n")
        terminal.see("3 messages saved")
        terminal.see("> ")
    asked = [(turn.role, turn.content) for turn in router.requests[0].messages.messages]
    assert asked == [("system", "Be short."), ("user", "a note\n\none\ntwo")]
    saved = [(turn["role"], turn["content"]) for turn in json.loads((tmp_path / "talk.json").read_text())]
    assert saved == [*asked, ("assistant", "Hello, world")]


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("/file /nowhere", "/file: cannot read /nowhere: No such file or directory"),
        ("/save", "/save takes a path"),
        ("/save {}", "is there already; name another file"),
        ("/hlep", "there is no command /hlep; /help lists them"),
        ("/flie notes.txt", "there is no command /flie; /help lists them"),
        ("/HELP", "there is no command /HELP; /help lists them"),
        ("/reset all", "/reset takes nothing after it"),
        ("/clear", "a new conversation begins"),
        ("/?", "/save PATH    writes the conversation"),
        ("/help", "/save PATH    writes the conversation"),
    ],
)
def test_a_command_that_cannot_be_done_says_why_and_asks_nothing(
    terminal: Terminal, router: Any, typed: str, shown: str, tmp_path: Path
) -> None:
    (tmp_path / "mine").write_text("mine")
    terminal.see("> ")
    terminal.type(typed.format(tmp_path / "mine") + "\n")
    terminal.see(shown)
    terminal.see("> ")
    assert router.requests == []
    assert (tmp_path / "mine").read_text() == "mine"


def test_ctrl_c_at_an_empty_prompt_says_how_to_leave(terminal: Terminal) -> None:
    terminal.see("> ")
    terminal.type("\x03")
    terminal.see("/exit or Ctrl-D leaves", pressed="\x03")
    terminal.see("> ")


def test_a_question_may_begin_with_a_path(terminal: Terminal, router: Any) -> None:
    terminal.see("> ")
    terminal.type("/etc/hosts: what is it for?\n")
    terminal.see("Hello, world")
    assert router.requests[0].messages.messages[0].content == "/etc/hosts: what is it for?"


@pytest.mark.parametrize("word", ["/bye", "/quit"])
def test_other_programs_words_for_leaving_are_understood(terminal: Terminal, word: str) -> None:
    terminal.see("> ")
    terminal.type(f"{word}\n")
    assert terminal.process.wait(timeout=60) == 0
