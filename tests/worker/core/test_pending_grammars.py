"""Grammars of long chains are built while the loop runs: none of them ends the process, whose stack they would not fit."""

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
from sapwood_common.grammar.artefact import COMPILE_STACK_BYTES, GrammarArtefact
from sapwood_common.grammar.compile_process import make
from sapwood_common.grammar.source import GrammarSource
from sapwood_common.grammar.vocabulary import TokenVocabulary
from sapwood_worker.core.event_loop import PendingGrammars
from sapwood_worker.model.grammar.llguidance import GrammarStore
import threading, numpy as np

kind, text = json.loads(sys.stdin.read())
vocabulary = TokenVocabulary([bytes([byte]) for byte in range(256)] + [b""], frozenset({256}))
found = []
def compile_():
    _, answer = make(b"[]")
    question = {"kind": kind, "text": text, "any_whitespace": True, "lenient": False}
    found.append(json.loads(answer(json.dumps(question).encode())))
threading.stack_size(COMPILE_STACK_BYTES)
thread = threading.Thread(target=compile_)
thread.start()
thread.join()
threading.stack_size(0)
artefact = GrammarArtefact.of(GrammarSource(kind, text), vocabulary.fingerprint, found[0]["lark"]).to_bytes()
store = GrammarStore(vocabulary, 257, (256,))
pending = PendingGrammars(store)
pending.start(1, "request", artefact, ())
while not (done := pending.poll(60)):
    pass
((_, state),) = done
state.fill(np.zeros(store.columns // 32 + 1, np.int32))
print("built")
"""


def _references(count: int) -> str:
    chain = {f"d{i}": {"type": "object", "properties": {"p": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(count)}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": {**chain, f"d{count}": {"type": "string"}}})


def _rules(count: int) -> str:
    rules = (f'r{index}: "a" r{index + 1} | "b"' for index in range(count))
    return "\n".join(("start: r0", *rules, f'r{count}: "x"'))


@pytest.mark.parametrize(("kind", "text"), [("json_schema", _references(5000)), ("ebnf", _rules(20_000))])
def test_a_chain_of_thousands_of_references_is_built_and_ends_no_process(kind, text) -> None:
    given = json.dumps([kind, text])
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], input=given, capture_output=True, text=True, timeout=300, check=False
    )
    assert (run.returncode, run.stdout) == (0, "built\n"), run.stderr[-2000:]
