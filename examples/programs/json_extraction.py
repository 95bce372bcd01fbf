"""JSON extraction: a schema holds the answer; the parsed value is a Python object."""

from __future__ import annotations

import sys

import sapwood.lang as sl

TEXT = "Ada Lovelace was born in London in 1815 and wrote about the analytical engine.\n"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "born": {"type": "integer", "minimum": 1000, "maximum": 2999},
    },
    "required": ["name", "born"],
    "additionalProperties": False,
}


@sl.function
def extract(s: sl.State, text: str) -> None:
    s += text + "As JSON: " + sl.gen("person", 48, json_schema=SCHEMA)


def run(backend: sl.Backend) -> sl.State:
    return extract.run(TEXT, backend=backend, temperature=0)


if __name__ == "__main__":
    state = run(sl.Sapwood())
    print("person:", state.value("person"))
    print("picture:", state.timeline().save(sys.argv[1] if sys.argv[1:] else "json_extraction.html"))
