"""A batch with a journal, as a program of its own that a test can kill: ``batch_of_rows.py ROUTER JOURNAL ROWS``."""

from __future__ import annotations

import sys

import sapwood.lang as sl


@sl.function
def continued(s: sl.State, number: int) -> str:
    """Continues a text, and adds a second answer to it."""
    s += f"Row {number} begins so:" + sl.gen("first", 3) + " and then" + sl.gen("second", 2)
    return str(s["first"] + s["second"])


def rows(count: int) -> list[dict[str, int]]:
    """The rows' arguments."""
    return [{"number": number} for number in range(count)]


if __name__ == "__main__":
    router, journal, count = sys.argv[1:]
    states = continued.run_batch(
        rows(int(count)), backend=sl.Sapwood(router), concurrency=32, journal=journal, temperature=0
    )
    print(len(states))
