"""ReAct: the model chooses a tool and its input, the program runs the tool, until the model finishes."""

from __future__ import annotations

import sys

import sapwood.lang as sl

PEOPLE = {"linus": "Linus Torvalds lives in Portland.", "ada": "Ada Lovelace lived in London."}
EXAMPLE = """\
Question: Where did Ada live?
Action: Search [ada]
Observation: Ada Lovelace lived in London.
Action: Finish [London]
"""


def search(name: str) -> str:
    return PEOPLE.get(name.strip().lower(), "Nothing was found.")


@sl.function
def react(s: sl.State, question: str, most: int = 3) -> str | None:
    s += EXAMPLE + "Question: " + question + "\n"
    for turn in range(most):
        s += "Action:" + sl.select(f"action_{turn}", [" Search", " Finish"])
        s += " [" + sl.gen(f"input_{turn}", 6, stop=["]", "\n"]) + "]\n"
        if s[f"action_{turn}"] == " Finish":
            return str(s[f"input_{turn}"])
        s += "Observation: " + search(s[f"input_{turn}"]) + "\n"
    return None


def run(backend: sl.Backend) -> sl.State:
    return react.run("Where does Linus live?", backend=backend, temperature=0)


if __name__ == "__main__":
    state = run(sl.Sapwood())
    print(state.text())
    print("answer:", state.returned)
    print("picture:", state.timeline().save(sys.argv[1] if sys.argv[1:] else "react.html"))
