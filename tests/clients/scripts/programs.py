"""Programs by the names that SGLang's language and ours share: the same source runs with either as ``sgl``.

``programs.py sapwood URL`` runs them with ours, ``programs.py FOLDER URL`` with the release of SGLang's that is in the folder.
Prints what each gave, and with ``--count GRPC METRICS`` what the server did for each; ours then go over gRPC. ``METRICS`` is
where the only worker's metrics are.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen


def make(sgl: Any) -> dict[str, Any]:
    """The programs, each a function without arguments that gives what it found."""

    @sgl.function
    def few_shot(s, city):
        s += "City: Paris. Country: France.\nCity: Rome. Country: Italy.\n"
        s += "City: " + city + ". Country:" + sgl.gen("country", max_tokens=6, stop=".")

    @sgl.function
    def dialogue(s, first, second):
        s += sgl.system("Answer in few words.")
        s += sgl.user(first)
        s += sgl.assistant(sgl.gen("one", max_tokens=8))
        with s.user():
            s += second
        with s.assistant():
            s += sgl.gen("two", max_tokens=8)

    @sgl.function
    def judge(s, statement):
        s += "Is it true? The sun is cold: no. Water is wet: yes. " + statement + ":"
        s += sgl.select("verdict", [" yes", " no", " unknown"])

    @sgl.function
    def numbers(s):
        s += (
            "A week has "
            + sgl.gen_int("days", max_tokens=4)
            + " days. Pi is "
            + sgl.gen("pi", dtype=float, max_tokens=4)
        )
        s += ". Code: " + sgl.gen("code", regex="[A-Z]{2}[0-9]{2}", max_tokens=8)

    @sgl.function
    def tools(s, left, right):
        s += "Use add(a, b). Example: add(1, 2) = 3\nadd(" + str(left) + ", "
        s += sgl.gen("right", max_tokens=4, regex="[0-9]{1,3}") + ") = "
        with s.var_scope("sum"):
            s += str(left + int(s["right"]))
        if int(s["right"]) > right:
            s += " large"

    @sgl.function
    def parallel(s, topic):
        s += "Notes about " + topic + ".\n"
        forks = s.fork(2)
        for i in range(2):
            forks[i] += f"Note {i + 1}:" + sgl.gen("note", max_tokens=6, stop="\n")
        forks.join()
        s += "First:" + forks[0]["note"] + " Second:" + forks[1]["note"] + "\nTogether:" + sgl.gen("all", max_tokens=6)

    @sgl.function
    def encoding(s, parts):
        s += "Statements.\n"
        forks = s.fork(len(parts))
        forks += lambda i: f"{i}: " + parts[i] + "\n"
        forks.join(mode="concate_and_append")
        s += "So" + sgl.gen("so", max_tokens=6)

    @sgl.function
    def ending(s, begin, endings):
        s += "He was tired: he slept.\n" + begin
        s += sgl.select("ending", endings)

    @sgl.function
    def typed(s):
        s += "Is it so? As JSON: " + sgl.gen("json", max_tokens=6, json_schema='{"type": "boolean"}')

    def endings() -> list[str]:
        rows = [{"begin": begin, "endings": [" he ate.", " he flew."]} for begin in ("He was hungry:", "He had wings:")]
        return [state["ending"] for state in ending.run_batch(rows, temperature=0)]

    def text_of_stream() -> str:
        state = few_shot.run(city="Berlin", temperature=0, stream=True)
        return "".join(state.text_iter())

    def batch() -> list[str]:
        states = few_shot.run_batch([{"city": city} for city in ("Madrid", "Oslo", "Athens")], temperature=0)
        return [state["country"] for state in states]

    def run(program: Any, *names: str, **arguments: Any) -> Any:
        def found() -> list[Any]:
            state = program.run(temperature=0, **arguments)
            return [state.text(), *(state[name] for name in names)]

        return found

    return {
        "few_shot": run(few_shot, "country", city="Vienna"),
        "dialogue": run(dialogue, "one", "two", first="Name a colour.", second="Another?"),
        "select": run(judge, "verdict", statement="Fire is hot"),
        "numbers": run(numbers, "days", "pi", "code"),
        "tools": run(tools, "right", "sum", left=4, right=9),
        "parallel": run(parallel, "all", topic="trees"),
        "endings": endings,
        "typed": run(typed, "json"),
        "encoding": run(encoding, "so", parts=["Ann is tall", "Bob is small"]),
        "stream": text_of_stream,
        "batch": batch,
    }


def measured(sgl: Any) -> dict[str, Any]:
    """Programs whose requests and tokens are counted: a tree of thought, and choices."""
    long = "The task is to make 24 of four numbers with plus, minus, times and divided by, each number once. " * 6

    @sgl.function
    def tree_of_thought(s, numbers):
        s += long + "Numbers: " + numbers + "\n"
        for _ in range(2):
            forks = s.fork(3)
            forks += "Next step:" + sgl.gen("step", max_tokens=8, temperature=0.8, stop="\n") + "\n"
            for fork in forks:
                fork += "Is this step" + sgl.select("verdict", [" sure", " likely", " hopeless"])
            forks.join()
            s += "Next step:" + forks[0]["step"] + "\n"

    @sgl.function
    def choose(s, statement):
        s += long + statement + "\nThis is" + sgl.select("x", [" true", " false", " unknown", " neither"])

    return {
        "tree_of_thought": lambda: tree_of_thought.run(numbers="4 5 6 10").text(),
        "select": lambda: [choose.run(statement=f"Four times {n} is 24.")["x"] for n in (5, 6)],
    }


REQUESTS = r"sapwood_router_requests_total\{.*\}"
COMPUTED = r"sapwood_worker_step_tokens_total\{kind=\"prefill\"\}"


def count(url: str, line: str) -> float:
    """The sum of a service's metrics whose name and labels match."""
    with urlopen(f"{url}/metrics") as answer:
        return sum(map(float, re.findall(rf"^{line} (\S+)$", answer.read().decode(), re.MULTILINE)))


class Record:
    """What a program has asked for: which tokens a server has to compute at least.

    Args:
        url: Of the server, which encodes the texts.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._prompts: list[str] = []
        self._answers: list[tuple[str, str]] = []
        self._paths: list[str] = []

    def generated(self, prompt: str, answer: str) -> None:
        """The model has continued a prompt."""
        self._prompts.append(prompt)
        self._answers.append((prompt, answer))

    def scored(self, path: str) -> None:
        """A path of a tree has a score, for which its last token is not computed."""
        self._paths.append(path)

    def distinct(self) -> int:
        """How many tokens, each after those before it, are in prompts and paths, without those that the model wrote itself.

        The last token of an answer has not been computed when the answer ends; it may have been where a stop string ended
        the answer, but it is counted here all the same.
        """
        asked = self._prefixes([self._tokens(text) for text in self._prompts])
        asked |= self._prefixes([self._tokens(text)[:-1] for text in self._paths])
        written: set[tuple[int, ...]] = set()
        for prompt, answer in self._answers:
            begun, whole = len(self._tokens(prompt)), self._tokens(prompt + answer)
            written |= {tuple(whole[:end]) for end in range(begun + 1, len(whole))}
        return len(asked - written)

    def _tokens(self, text: str) -> list[int]:
        request = Request(
            f"{self._url}/tokenize", json.dumps({"prompt": text}).encode(), {"content-type": "application/json"}
        )
        with urlopen(request) as answer:
            return list(json.load(answer)["tokens"])

    @staticmethod
    def _prefixes(sequences: Sequence[Sequence[int]]) -> set[tuple[int, ...]]:
        return {tuple(each[:end]) for each in sequences for end in range(1, len(each) + 1)}


def record_theirs(record: Record) -> None:
    """Has SGLang's endpoint record what it sends to ``/generate``."""
    from sglang.lang.backend import runtime_endpoint
    from sglang.utils import http_request

    def recorded(url: str, json: Any = None, **more: Any) -> Any:
        found = http_request(url, json=json, **more)
        if url.endswith("/generate"):
            answers = found.json()
            texts = json["text"] if isinstance(json["text"], list) else [json["text"]]
            for text, answer in zip(texts, answers if isinstance(answers, list) else [answers], strict=True):
                record.generated(text, answer["text"])
        return found

    runtime_endpoint.http_request = recorded


def recording_backend(sgl: Any, address: str, record: Record) -> Any:
    """Our backend, which records what it asks for."""

    class Recording(sgl.Sapwood):  # type: ignore[misc]
        async def generate(self, prompt: Any, options: Any) -> Any:
            found = await super().generate(prompt, options)
            for text in found.texts:
                record.generated(prompt.text, text)
            return found

        async def score(self, prompt: Any, choices: Sequence[str], *, unconditional: bool) -> Any:
            for choice in choices:
                record.scored(prompt.text + choice)
            return await super().score(prompt, choices, unconditional=unconditional)

    return Recording(address)


def main() -> None:
    """Runs them."""
    where, url = sys.argv[1:3]
    if where == "sapwood":
        import sapwood.lang as sgl
    else:
        sys.path.insert(0, str(Path(__file__).parent))
        from sglang_lang import lay

        sgl = lay(Path(where))
        sgl.global_config.enable_parallel_encoding = False
    sgl.set_default_backend(sgl.RuntimeEndpoint(url))
    if "--count" in sys.argv:
        address, worker = sys.argv[4:6]
        counted = {}
        for name, program in measured(sgl).items():
            record = Record(url)
            if where == "sapwood":
                sgl.set_default_backend(recording_backend(sgl, address, record))
            else:
                record_theirs(record)
            urlopen(Request(f"{url}/flush_cache", b"", method="POST")).read()
            before = count(url, REQUESTS), count(worker, COMPUTED)
            program()
            requests, computed = count(url, REQUESTS) - before[0], count(worker, COMPUTED) - before[1]
            counted[name] = {"requests": requests, "computed": computed, "distinct": record.distinct()}
        print(json.dumps(counted))
        return
    print(json.dumps({name: program() for name, program in make(sgl).items()}))


if __name__ == "__main__":
    main()
