"""LLM judge: which of two answers is better, asked in both orders, by the likelihood of each verdict."""

from __future__ import annotations

import sys

import sapwood.lang as sl

QUESTION = "What is the capital of France?"
ANSWERS = ("Paris.", "I do not know.")
VERDICTS = [" first", " second"]


@sl.function
def judge(s: sl.State, question: str, one: str, other: str) -> float:
    """How much likelier the first answer is the better one, in both orders; negative: the second one."""
    orders = s.fork(2)
    for fork, (first, second) in zip(orders, ((one, other), (other, one)), strict=True):
        fork += f"Question: {question}\nFirst answer: {first}\nSecond answer: {second}\nThe better answer is the"
        fork += sl.select("verdict", VERDICTS)
    scores = [fork.get_meta_info("verdict")["scores"] for fork in orders]
    ahead, behind = (score[" first"] - score[" second"] for score in scores)
    return float(ahead - behind)


def run(backend: sl.Backend) -> sl.State:
    return judge.run(QUESTION, *ANSWERS, backend=backend)


if __name__ == "__main__":
    state = run(sl.Sapwood())
    print(f"better: {ANSWERS[state.returned < 0]!r} (by {abs(state.returned):.3f})")
    print("picture:", state.timeline().save(sys.argv[1] if sys.argv[1:] else "judge.html"))
