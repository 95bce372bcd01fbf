"""The package by itself: its example runs, and it imports nothing of Sapwood."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

import sapwood_net
from sapwood_net.__main__ import SERVICE, call, make_server
from sapwood_net.http2.client.duplex_call import CallEndedError
from sapwood_net.sockets.port import Port

FOLDER = Path(sapwood_net.__file__).parent


def test_every_module_loads_in_a_copy_beside_nothing_of_sapwood(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "sapwood_net", ignore=shutil.ignore_patterns("__pycache__"))
    modules = [
        ".".join(file.relative_to(tmp_path).with_suffix("").parts) for file in (tmp_path / "sapwood_net").rglob("*.py")
    ]
    assert len(modules) > 40
    script = (
        "import importlib, sys\n"
        f"sys.path[:] = [{str(tmp_path)!r}] + [path for path in sys.path if 'sapwood' not in path]\n"
        "sys.meta_path[:] = [each for each in sys.meta_path if 'editable' not in repr(each).lower()]\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "assert sys.modules['sapwood_net'].__path__[0].startswith(sys.path[0])\n"
        "print(sorted(name for name in sys.modules if name.startswith('sapwood') and name.split('.')[0] != 'sapwood_net'))\n"
    )
    run = subprocess.run(
        [sys.executable, "-P", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    assert (run.returncode, run.stdout.strip()) == (0, "[]"), run.stderr


async def test_the_example_answers_its_own_client_and_grpcio() -> None:
    server = make_server()
    port = await server.start(Port("127.0.0.1", 0))
    try:
        assert await call(f"127.0.0.1:{port}", ["hello", "good bye"]) == ["hello", "good bye"]
        with pytest.raises(CallEndedError, match="there is nothing to say") as ended:
            await call(f"127.0.0.1:{port}", [""])
        assert ended.value.code is grpc.StatusCode.INVALID_ARGUMENT
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            assert await channel.unary_unary(f"/{SERVICE}/Say")(b"hello") == b"hello"
    finally:
        await server.stop(1.0)


async def test_the_example_runs_as_its_readme_says() -> None:
    serving = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "sapwood_net", "serve", "0"), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert serving.stdout is not None
        address = (await serving.stdout.readline()).decode().split()[-1]
        command = [sys.executable, "-P", "-m", "sapwood_net", "call", address]
        called = await asyncio.to_thread(
            subprocess.run, [*command, "hello", "good bye"], capture_output=True, text=True, check=False
        )
        assert (called.returncode, called.stdout) == (0, "hello\ngood bye\n")
        wrong = await asyncio.to_thread(subprocess.run, command[:-1], capture_output=True, text=True, check=False)
        assert wrong.returncode == 2 and wrong.stderr.startswith("usage: ")
    finally:
        serving.terminate()
        await serving.wait()
