"""Long-document QA: the document is computed once and kept, and each question is a fork that goes on from it."""

from __future__ import annotations

import sys

import sapwood.lang as sl

DOCUMENT = "".join(f"Room {number} is on floor {number // 10} and is painted {colour}.\n" for number, colour in zip(
    range(10, 34), ["red", "blue", "green", "white", "grey", "brown"] * 4, strict=True))  # fmt: skip
QUESTIONS = ["Room 12 is painted", "Room 25 is on floor", "Room 31 is painted"]


@sl.function
def ask(s: sl.State, document: str, questions: list[str]) -> list[str]:
    s += document
    s.commit()
    forks = s.fork(len(questions))
    for fork, question in zip(forks, questions, strict=True):
        fork += "Answer: " + question + sl.gen("answer", 4, stop=[".", "\n"])
    forks.join()
    return list(s["answer"])


def run(backend: sl.Backend) -> sl.State:
    return ask.run(DOCUMENT, QUESTIONS, backend=backend, temperature=0)


if __name__ == "__main__":
    state = run(sl.Sapwood())
    for question, answer in zip(QUESTIONS, state.returned, strict=True):
        print(question + answer)
    print("picture:", state.timeline().save(sys.argv[1] if sys.argv[1:] else "document_qa.html"))
