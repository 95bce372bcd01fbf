"""Self-consistency: several answers to one question in one request, and the one that most of them give."""

from __future__ import annotations

import sys
from collections import Counter

import sapwood.lang as sl

QUESTION = "Q: 2 + 2 is\nA: 4\nQ: 3 + 4 is\nA:"


@sl.function
def most_common(s: sl.State, samples: int = 5) -> str:
    s += QUESTION + sl.gen("answers", 3, n=samples, temperature=0.7, seed=7, stop="\n")
    return str(Counter(answer.strip() for answer in s["answers"]).most_common(1)[0][0])


def run(backend: sl.Backend) -> sl.State:
    return most_common.run(backend=backend)


if __name__ == "__main__":
    state = run(sl.Sapwood())
    print("answers:", state["answers"])
    print("most common:", state.returned)
    print("picture:", state.timeline().save(sys.argv[1] if sys.argv[1:] else "self_consistency.html"))
