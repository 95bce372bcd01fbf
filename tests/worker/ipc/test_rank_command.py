"""How the processes that run the model are started."""

from __future__ import annotations

import json
from pathlib import Path

from sapwood_worker.config import WorkerConfig
from sapwood_worker.ipc.rank import rank_command


def test_neither_the_configuration_nor_the_key_is_on_a_ranks_command_line() -> None:
    config = WorkerConfig(model="s3://key:geheim@bucket/model")
    command = rank_command("rank_process", Path("/run/x"), config, "module:make", "--rank", "1", key=b"\x07" * 16)
    assert command.arguments[:2] == ["-m", "sapwood_worker.core.rank_process"]
    shown = " ".join(command.arguments)
    assert "geheim" not in shown
    assert "07" * 16 not in shown
    task = json.loads(command.task)
    assert json.loads(task["config"])["model"] == "s3://key:geheim@bucket/model"
    assert task["key"]
