"""Tree of thought: several next steps, each judged; the best one is kept, and the tree grows from there."""

from __future__ import annotations

import sys

import sapwood.lang as sl

TASK = "Plan a day in Rome.\n"
VERDICTS = [" good", " poor"]


@sl.function
def plan(s: sl.State, depth: int = 2, width: int = 3) -> list[str]:
    s += TASK
    steps: list[str] = []
    for level in range(depth):
        forks = s.fork(width)
        for index, fork in enumerate(forks):
            fork += f"Step {level + 1}, idea {index + 1}:" + sl.gen("step", 8, stop="\n")
            fork += "\nThis idea is" + sl.select("verdict", VERDICTS)
        best = max(range(width), key=lambda i: forks[i].get_meta_info("verdict")["scores"][" good"])
        steps.append(forks[best]["step"])
        s += f"Step {level + 1}:" + steps[-1] + "\n"
    return steps


def run(backend: sl.Backend) -> sl.State:
    return plan.run(backend=backend, temperature=0)


if __name__ == "__main__":
    state = run(sl.Sapwood())
    print(state.text())
    print("picture:", state.timeline().save(sys.argv[1] if sys.argv[1:] else "tree_of_thought.html"))
