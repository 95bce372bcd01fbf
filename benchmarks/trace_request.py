"""What one streamed chat runs through: files, classes, functions, live objects, process borders, and calls a token.

Each process of a cluster on the demo model records the calls of Sapwood's own code in its main thread while a chat streams. The
calls of an equally long time without requests are subtracted. The slope between a short and a long answer is
what a token costs; live objects are the instances of Sapwood's classes that exist in the middle of the stream and not before.
A token crosses two borders (scheduler to front, front to router), and two more where the tokenizer service takes part in each.

    python benchmarks/trace_request.py [--json] [--calls router]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import sapwood

ROOT = Path(__file__).resolve().parents[1]
SHORT, LONG = 16, 64
"""Tokens of the two answers."""
PROCESSES = {
    "router": "sapwood_router",
    "tokenizer": "sapwood_tokenizer",
    "front": "sapwood_worker",
    "scheduler": "sapwood_worker.core.scheduler_process",
}
"""The processes and the modules that they run."""
PROMPT = "Write a long story about a small house."

RECORDER = """
import gc, json, os, signal, sys
from collections import Counter

folder, root = os.environ["SAPWOOD_TRACE"], os.environ["SAPWOOD_TRACE_ROOT"]
calls = Counter()
names = {}

def own(path):
    return path.startswith(root) and ".venv" not in path

def record(frame, event, _):
    if event == "call":
        code = frame.f_code
        name = names.get(code)
        if name is None:
            path = code.co_filename
            name = names[code] = f"{path[len(root) + 1:]}:{code.co_qualname}" if own(path) else ""
        if name:
            calls[name] += 1

def living():
    found = Counter()
    for thing in gc.get_objects():
        kind = type(thing)
        module = sys.modules.get(kind.__module__)
        if module is not None and own(getattr(module, "__file__", None) or ""):
            found[f"{kind.__module__}.{kind.__qualname__}"] += 1
    return found

def obey(*_):
    word = open(os.path.join(folder, "word")).read()
    if word == "start":
        calls.clear()
        sys.setprofile(record)
        answer = {}
    elif word == "stop":
        sys.setprofile(None)
        answer = dict(calls)
    else:
        gc.collect()
        answer = dict(living())
    path = os.path.join(folder, f"{os.getpid()}.{word}")
    with open(path + ".part", "w") as file:
        json.dump({"command": sys.orig_argv, "answer": answer}, file)
    os.rename(path + ".part", path)

signal.signal(signal.SIGUSR1, obey)
"""
"""Runs in each process: does what the file ``word`` says at SIGUSR1, and writes what it found next to it."""


class Processes:
    """The recorders of all processes that were started with this environment."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "sitecustomize.py").write_text(RECORDER, encoding="utf-8")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        os.environ["SAPWOOD_TRACE"], os.environ["SAPWOOD_TRACE_ROOT"] = str(folder), str(ROOT)

    def say(self, word: str) -> dict[str, Counter[str]]:
        """Has each process do a thing; gives what each of them answers, by the process's name."""
        (self._folder / "word").write_text(word)
        pids = [pid for pid in (int(path.name) for path in Path("/proc").glob("[0-9]*")) if self._records(pid)]
        for pid in pids:
            os.kill(pid, 10)
        found = {}
        for pid in pids:
            path = self._folder / f"{pid}.{word}"
            for _ in range(1000):
                if path.exists():
                    break
                time.sleep(0.01)
            else:
                continue  # it has ended
            said = json.loads(path.read_text())
            path.unlink()
            found[name_of(said["command"], pid)] = Counter(said["answer"])
        return found

    def _records(self, pid: int) -> bool:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return False
        ours = f"SAPWOOD_TRACE={self._folder}".encode() in environment
        return ours and pid != os.getpid() and b"python" in command.split(b"\0")[0]


def name_of(command: list[str], pid: int) -> str:
    """What a process is, by its command line."""
    for name, module in PROCESSES.items():
        if module in command:
            return name
    return f"{pid}"


def subtract(one: dict[str, Counter[str]], other: dict[str, Counter[str]]) -> dict[str, Counter[str]]:
    return {name: calls - other.get(name, Counter()) for name, calls in one.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--calls", metavar="PROCESS", help="print what is called for each token in a process, too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        processes = Processes(Path(folder))
        with sapwood.Server("demo-base", workers=1) as server, server.client() as client:
            messages = [{"role": "user", "content": PROMPT}]

            def chat(tokens: int) -> None:
                for _ in client.generate(messages=messages, max_tokens=tokens, temperature=0, ignore_eos=True):
                    pass

            for _ in range(3):
                chat(LONG)
            recorded = {}
            for tokens in (SHORT, LONG):
                processes.say("start")
                began = time.monotonic()
                chat(tokens)
                took = time.monotonic() - began
                asked = processes.say("stop")
                time.sleep(0.5)
                processes.say("start")
                time.sleep(took)
                recorded[tokens] = subtract(asked, processes.say("stop"))
            before = processes.say("count")
            stream = iter(client.generate(messages=messages, max_tokens=LONG, temperature=0, ignore_eos=True))
            for _ in range(LONG // 4):
                next(stream)
            living = subtract(processes.say("count"), before)
            for _ in stream:
                pass
    show(recorded, living, arguments.json, arguments.calls)


def show(
    recorded: dict[int, dict[str, Counter[str]]], living: dict[str, Counter[str]], as_json: bool, calls: str | None
) -> None:
    rows = {}
    for name, called in recorded[LONG].items():
        short = recorded[SHORT].get(name, Counter())
        files = {where.split(":")[0] for where in called}
        classes = {where.rsplit(".", 1)[0] for where in called if "." in where.split(":")[1].replace(".<locals>", "")}
        a_token = sum(called.values()) - sum(short.values())
        rows[name] = (files, classes, set(called), a_token / (LONG - SHORT), sum(living.get(name, Counter()).values()))
    rows = {name: row for name, row in rows.items() if row[2]}
    total = {
        "files": len(set().union(*(row[0] for row in rows.values()))),
        "classes": len(set().union(*(row[1] for row in rows.values()))),
        "functions": len(set().union(*(row[2] for row in rows.values()))),
        "calls_a_token": round(sum(row[3] for row in rows.values()), 1),
        "live_objects": sum(row[4] for row in rows.values()),
        "borders": 4 if "tokenizer" in rows and rows["tokenizer"][3] > 1 else 2,
    }
    each = {
        name: {
            "files": len(files),
            "classes": len(kinds),
            "functions": len(functions),
            "calls_a_token": round(a_token, 1),
            "live_objects": alive,
        }
        for name, (files, kinds, functions, a_token, alive) in rows.items()
    }
    if as_json:
        print(json.dumps({"all": total, **each}))
    else:
        print(f"{'':<14}{'files':>7}{'classes':>9}{'functions':>11}{'calls a token':>15}{'live objects':>14}")
        for name, row in {**each, "all, distinct": total}.items():
            print(
                f"{name:<14}{row['files']:>7}{row['classes']:>9}{row['functions']:>11}"
                f"{row['calls_a_token']:>15}{row['live_objects']:>14}"
            )
        print(f"process borders that a token crosses: {total['borders']}")
    if calls:
        counts = recorded[LONG][calls] - recorded[SHORT].get(calls, Counter())
        for where, count in counts.most_common():
            if count >= (LONG - SHORT) // 4:
                print(f"{count / (LONG - SHORT):8.2f}  {where}", file=sys.stderr)


if __name__ == "__main__":
    main()
