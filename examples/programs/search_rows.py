"""Search over 1 000 rows: each is put into a class, many at a time, with a journal that survives a crash."""

from __future__ import annotations

import sys
from pathlib import Path

import sapwood.lang as sl

THINGS = ["oak", "trout", "rose", "shark", "fir", "carp", "tulip", "eel", "elm", "cod"]
ROWS = [{"row": f"{thing}, number {number}"} for number in range(100) for thing in THINGS]
TASK = """\
Say whether each entry is a plant or a fish.
pine, number 7: plant
salmon, number 3: fish
"""


@sl.function
def classify(s: sl.State, row: str) -> None:
    s += TASK + row + ":" + sl.gen("kind", 2, regex=" (plant|fish)")


def run(backend: sl.Backend, rows: int = len(ROWS), journal: str | Path | None = None) -> list[sl.State]:
    return classify.run_batch(ROWS[:rows], backend=backend, temperature=0, progress_bar=True, journal=journal)


if __name__ == "__main__":
    states = run(sl.Sapwood(), journal="search_rows.jsonl")
    found = [row["row"] for row, state in zip(ROWS, states, strict=True) if state["kind"] == " fish"]
    print(f"{len(found)} of {len(ROWS)} are fish: {', '.join(found[:4])}, ...")
    print("picture:", states[0].timeline().save(sys.argv[1] if sys.argv[1:] else "search_rows.html"))
