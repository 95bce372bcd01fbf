"""The contracts as other languages and other programs take them: options, descriptor set, and what may not change."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from importlib.resources import as_file, files
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool

from sapwood_kernels.native.build import find_compiler

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("common", "gateway", "router", "tokenizer", "worker")


def run(program: str, *arguments: str | Path, cwd: Path = ROOT) -> tuple[int, str]:
    """Runs a program of this environment; its exit code and all it prints."""
    found = shutil.which(program, path=str(Path(sys.executable).parent)) or program
    done = subprocess.run(
        [found, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=cwd,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def descriptors() -> dict[str, FileDescriptorProto]:
    """The files in the descriptor set of the installed package."""
    raw = (files("sapwood.v1") / "descriptors.binpb").read_bytes()
    return {file.name: file for file in FileDescriptorSet.FromString(raw).file}


def test_the_descriptor_set_is_whole_and_has_the_comments(descriptors: dict[str, FileDescriptorProto]) -> None:
    assert {f"sapwood/v1/{name}.proto" for name in NAMES} == descriptors.keys(), "make proto writes it"
    pool = DescriptorPool()
    for file in descriptors.values():  # a file comes after what it imports
        pool.AddSerializedFile(file.SerializeToString())
    for name in ("Router", "Tokenizer", "Worker"):
        assert pool.FindServiceByName(f"sapwood.v1.{name}").methods
    comments = [place.leading_comments for place in descriptors["sapwood/v1/router.proto"].source_code_info.location]
    assert any("Streams the continuation of a prompt." in text for text in comments)


def test_the_descriptor_set_is_that_of_the_protos(descriptors: dict[str, FileDescriptorProto], tmp_path: Path) -> None:
    image = tmp_path / "now.binpb"
    assert run("buf", "build", "protos", "--exclude-source-info", "-o", image) == (0, "")
    for file in FileDescriptorSet.FromString(image.read_bytes()).file:
        ours = FileDescriptorProto.FromString(descriptors[file.name].SerializeToString())
        ours.ClearField("source_code_info")
        file.DiscardUnknownFields()  # what buf notes about a file
        assert ours == file, "make proto writes it again"


def test_grpcurl_reads_the_descriptor_set_without_a_server() -> None:
    with as_file(files("sapwood.v1") / "descriptors.binpb") as path:
        code, shown = run("grpcurl", "-protoset", path, "describe", "sapwood.v1.Router.Generate")
    assert code == 0, shown
    assert "rpc Generate ( .sapwood.v1.RouterGenerateRequest ) returns ( stream" in shown
    assert "// Streams the continuation of a prompt." in shown


def test_the_wheel_has_the_descriptor_set(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for folder in ("protos", "sapwood", "sapwood_testing", "services", "kernels"):
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "*_pb2*", "*.binpb")
        )
    code, shown = run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", cwd=tmp_path)
    assert code == 0, shown
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("sapwood/v1/descriptors.binpb") == (files("sapwood.v1") / "descriptors.binpb").read_bytes()
        names = archive.namelist()
    assert "sapwood/v1/worker_pb2_grpc.pyi" in names
    assert not [name for name in names if "fake" in name or "testing" in name]
    assert "sapwood_kernels/native/steps.c" in names
    assert any(re.fullmatch(r"sapwood_kernels/native/sapwood\..*\.so", name) for name in names) == bool(find_compiler())


def test_every_file_says_where_go_and_java_put_it(descriptors: dict[str, FileDescriptorProto]) -> None:
    for name in NAMES:
        options = descriptors[f"sapwood/v1/{name}.proto"].options
        assert options.go_package == "sapwood/v1;sapwoodv1"
        assert (options.java_package, options.java_multiple_files) == ("com.sapwood.v1", True)
        assert options.java_outer_classname == f"{name.capitalize()}Proto"


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("common", r"repeated uint32 ids = 1;", "repeated uint64 ids = 1;", 'Field "1"'),
        ("common", r"  string role = 1;", "  string part = 1;", '"role" to "part"'),
        ("common", r"  string role = 1;\n", "", 'Previously present field "1"'),
        ("router", r"  rpc Embed\(.*\n", "", 'Previously present RPC "Embed"'),
        ("worker", r"rpc Resume\(ResumeRequest\)", "rpc Resume(PauseRequest)", '"Resume"'),
        ("router", r"TOOL_CHOICE_NONE = 2;", "TOOL_CHOICE_NONE = 9;", 'enum "ToolChoice"'),
        ("common", r"message TokenIds \{", "message TokenIds {\n  repeated string texts = 99;", None),
        (
            "router",
            r"service Router \{",
            "service Router {\n  rpc More(ListModelsRequest) returns (ListModelsResponse);",
            None,
        ),
    ],
)
def test_lint_refuses_what_breaks_clients_and_lets_additions_pass(
    tmp_path: Path, file: str, old: str, new: str, said: str | None
) -> None:
    (command,) = re.findall(r"buf breaking (\S+) --against (\S+)$", run("make", "--dry-run", "lint")[1], re.MULTILINE)
    shutil.copytree(ROOT / command[0], tmp_path / "protos")
    proto = tmp_path / f"protos/sapwood/v1/{file}.proto"
    changed, count = re.subn(old, new, proto.read_text())
    assert count == 1
    proto.write_text(changed)
    code, shown = run("buf", "breaking", tmp_path / "protos", "--against", ROOT / command[1])
    assert (code != 0) is (said is not None), shown
    assert (said or "") in shown
