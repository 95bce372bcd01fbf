"""Few-shot: examples before the question. Run it with `sapwood up` running: python examples/programs/few_shot.py"""

from __future__ import annotations

import sys

import sapwood.lang as sl

EXAMPLES = [("France", "Paris"), ("Italy", "Rome"), ("Austria", "Vienna")]
QUESTIONS = ["Germany", "Spain", "Japan"]


@sl.function
def capital(s: sl.State, country: str) -> None:
    for known, city in EXAMPLES:
        s += f"The capital of {known}: {city}\n"
    s += "The capital of " + country + ":" + sl.gen("city", 5, stop="\n")


def run(backend: sl.Backend) -> list[sl.State]:
    return capital.run_batch([{"country": country} for country in QUESTIONS], backend=backend, temperature=0)


if __name__ == "__main__":
    states = run(sl.Sapwood())
    for country, state in zip(QUESTIONS, states, strict=True):
        print(f"{country}:{state['city']}")
    print("picture:", states[0].timeline().save(sys.argv[1] if sys.argv[1:] else "few_shot.html"))
