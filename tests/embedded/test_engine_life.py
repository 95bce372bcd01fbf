"""How engines start, share a process, lose parts of themselves, and end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import sapwood
from sapwood.errors import CancelledError, UnavailableError

pytestmark = pytest.mark.slow

GREEDY = {"max_tokens": 6, "temperature": 0}
SETTINGS = {"load_format": "dummy", "num_pages": 1024, "threads": 1}
PROGRAM = """
import sys
import sapwood

with sapwood.Engine(sys.argv[1], load_format="dummy", num_pages=1024, threads=1) as engine:
    print("ready", flush=True)
    try:
        engine.generate(["go on"] * 4, max_tokens=10_000, ignore_eos=True)
    except KeyboardInterrupt:
        print("interrupted", engine.generate("fine", max_tokens=3).finish_reason, flush=True)
print("over", flush=True)
"""


def _folder(engine: Any) -> Path:
    return Path(engine._cluster._folder.path)


def test_two_engines_in_one_process_answer_alike_and_leave_nothing(tiny: Path, children: Any) -> None:
    with sapwood.Engine(str(tiny), **SETTINGS) as first, sapwood.Engine(str(tiny), workers=2, **SETTINGS) as second:
        texts = [f"number {index}" for index in range(20)]
        both = [[answer.token_ids for answer in each.generate(texts, **GREEDY)] for each in (first, second)]
        assert both[0] == both[1]
        assert sorted(children().values()).count("sapwood_worker") == 3
        assert _folder(first).is_dir() and _folder(second).is_dir()
    assert not children()
    assert not _folder(first).exists() and not _folder(second).exists()
    for use in (lambda: first.generate("a"), first.start):
        with pytest.raises(UnavailableError, match="closed"):
            use()
    first.close()


def test_an_engines_greedy_answers_are_those_of_transformers(tiny: Path, tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    config.initializer_range = 0.3  # far from ties
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    with sapwood.Engine(str(tmp_path), num_pages=1024, threads=1) as engine:
        texts = ["abc", "some longer text", "x"]
        answers = engine.generate(texts, max_tokens=24, temperature=0, ignore_eos=True)
        for text, answer in zip(texts, answers, strict=True):
            prompt = torch.tensor([engine.tokenize(text)])
            with torch.no_grad():
                whole = model.generate(prompt, max_new_tokens=24, min_new_tokens=24, do_sample=False, eos_token_id=None)
            assert list(answer.token_ids) == whole[0, prompt.shape[1] :].tolist()


def test_a_batch_runs_as_many_at_a_time_as_there_is_room_for(tiny: Path, until: Any) -> None:
    with sapwood.Engine(str(tiny), max_running=16, **SETTINGS) as engine:
        found: list[Any] = []
        asking = threading.Thread(
            target=lambda: found.extend(engine.generate(["go on"] * 2000, max_tokens=4, ignore_eos=True))
        )
        asking.start()
        until(lambda: any(worker.running_requests == 16 for worker in engine._stream.list_workers()))
        asking.join()
    assert [answer.usage.completion_tokens for answer in found] == [4] * 2000


@pytest.mark.parametrize("part", ["sapwood_worker", "sapwood_worker.core.scheduler_process", "sapwood_tokenizer"])
def test_a_part_that_is_killed_costs_a_batch_a_pause_only(tiny: Path, children: Any, until: Any, part: str) -> None:
    asked: dict[str, Any] = {"max_tokens": 400, "temperature": 1, "seed": 7, "ignore_eos": True}
    with sapwood.Engine(str(tiny), **SETTINGS) as engine:
        texts = [f"number {index}" for index in range(8)]
        undisturbed = [answer.token_ids for answer in engine.generate(texts, **asked)]
        found: list[Any] = []
        asking = threading.Thread(target=lambda: found.extend(engine.generate(texts, **asked)))
        asking.start()
        until(lambda: any(worker.running_requests for worker in engine._stream.list_workers()))
        os.kill(next(pid for pid, module in children().items() if module == part), signal.SIGKILL)
        asking.join()
        assert [answer.token_ids for answer in found] == undisturbed


def test_a_router_that_is_killed_ends_the_engine_with_a_clear_error(tiny: Path, children: Any, until: Any) -> None:
    engine = sapwood.Engine(str(tiny), **SETTINGS).start()
    os.kill(next(pid for pid, module in children().items() if module == "sapwood_router"), signal.SIGKILL)
    with pytest.raises(UnavailableError):
        engine.generate("go on", max_tokens=10_000, ignore_eos=True)
    until(lambda: not children())
    with pytest.raises(UnavailableError, match="router was killed by SIGKILL"):
        engine.generate("a")
    engine.close()


def test_closing_ends_the_calls_of_other_threads(tiny: Path, until: Any) -> None:
    engine = sapwood.Engine(str(tiny), **SETTINGS).start()
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            engine.generate(["go on"] * 3, max_tokens=10_000, ignore_eos=True)
        except CancelledError as error:
            errors.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: any(worker.running_requests for worker in engine._stream.list_workers()))
    engine.close()
    asking.join()
    assert len(errors) == 1


def test_a_model_that_cannot_be_loaded_fails_the_start_with_what_the_worker_said(tiny: Path, children: Any) -> None:
    (tiny.parent / "odd").mkdir(exist_ok=True)
    for file in tiny.iterdir():
        (tiny.parent / "odd" / file.name).write_text(file.read_text().replace("LlamaForCausalLM", "OddForCausalLM"))
    engine = sapwood.Engine(str(tiny.parent / "odd"), **SETTINGS)
    with pytest.raises(UnavailableError, match="OddForCausalLM"):
        engine.start()
    assert not children() and not _folder(engine).exists()


def _program(tiny: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tiny)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_ctrl_c_ends_a_call_and_leaves_the_engine(tiny: Path, children: Any, until: Any) -> None:
    with _program(tiny) as process:
        pids = children(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.communicate()[0] == "interrupted length\nover\n"
        assert process.returncode == 0
    assert pids and not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_program_that_is_killed_leaves_no_process(tiny: Path, children: Any, until: Any) -> None:
    with _program(tiny) as process:
        pids = children(process.pid)
        assert {"sapwood_router", "sapwood_tokenizer", "sapwood_worker"} <= set(pids.values())
        process.kill()
    until(lambda: not any(_runs(pid) for pid in pids))


def test_an_engine_that_is_never_closed_ends_with_its_program(tiny: Path, children: Any, until: Any) -> None:
    program = PROGRAM.replace("with sapwood", "engine = sapwood").replace(") as engine:", ").start()\nif True:")
    program = program.replace("max_tokens=10_000", "max_tokens=3")
    done = subprocess.run([sys.executable, "-c", program, str(tiny)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ready\nover\n", "")


def test_a_program_that_uses_uvloop_may_have_an_engine(tiny: Path) -> None:
    program = f"import uvloop\nuvloop.install()\n{PROGRAM}".replace("max_tokens=10_000", "max_tokens=3")
    done = subprocess.run([sys.executable, "-c", program, str(tiny)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ready\nover\n", "")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
