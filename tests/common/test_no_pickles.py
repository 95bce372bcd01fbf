"""Nothing that comes over a socket is unpickled: a pickle runs what its sender likes."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHIPPED = ("sapwood", "services", "kernels")
_CALLS = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "recv_pyobj",
    "send_pyobj",
}
_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
_OWN_PIPES = {"services/tokenizer/sapwood_tokenizer/serve/process_group.py"}
"""Where a process reads from a pipe of a child that it forked."""


def _faults(path: Path) -> list[str]:
    tree, found = ast.parse(path.read_text()), []
    connected = "multiprocessing.connection" in path.read_text()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names) if any(name.name.partition(".")[0] in _MODULES for name in names):
                found.append("imports pickle")
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in _MODULES:
                found.append("imports pickle")
            case ast.Attribute(attr=name) if name in _CALLS:
                found.append(name)
            case ast.Call(func=ast.Attribute(attr="recv"), args=[]) if connected:
                found.append("Connection.recv")
            case ast.Call(func=ast.Attribute(attr="load", value=ast.Name(id="torch")), keywords=keywords):
                if not any(each.arg == "weights_only" and ast.unparse(each.value) == "True" for each in keywords):
                    found.append("torch.load")
    return found


def test_no_source_unpickles_what_others_send() -> None:
    for folder in SHIPPED:
        for path in (ROOT / folder).rglob("*.py"):
            name = str(path.relative_to(ROOT))
            if name not in _OWN_PIPES:
                assert not _faults(path), name
