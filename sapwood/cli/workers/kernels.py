"""`sapwood kernels`: compiles what workers need on a GPU, once, and keeps it in an archive."""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from sapwood.cli.errors import EXIT_CODES, FAILED, REFUSED, CliError
from sapwood_common.python_process import python_command, python_environment

_DESCRIPTION = """\
Compiles the kernels that workers with some flags need on this machine's GPU, and writes them to an archive. A worker that is
started with --kernels FILE (or a folder of such files, as our CUDA image has one) on a machine with such a GPU and the same
packages compiles nothing. The model's weights are not needed: made-up ones are multiplied.

  sapwood kernels build sm90.tgz --worker "--model Qwen/Qwen3-0.6B" --worker "--model llama-8b --kv-cache-dtype fp8_e4m3"
"""


def configure(verbs: Any) -> None:
    """Adds the verb to the parser."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        "kernels",
        help="compile GPU kernels ahead of time",
        description="Compiles GPU kernels ahead of time.",
        epilog=EXIT_CODES,
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True, title="actions")
    build: argparse.ArgumentParser = actions.add_parser(
        "build",
        help="write an archive of what workers need on this GPU",
        description=_DESCRIPTION,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    build.add_argument("archive", metavar="FILE", type=Path, help="the new archive (.tgz)")
    build.add_argument(
        "--worker",
        metavar="FLAGS",
        action="append",
        required=True,
        help="the flags of a worker, quoted; repeatable: an archive can hold what several need",
    )
    build.add_argument("--verbose", action="store_true", help="show the workers' logs")
    build.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Compiles; returns the exit code, raises CliError."""
    if importlib.util.find_spec("torch") is None:
        raise CliError("torch is not installed: pip install 'sapwood[gpu]'", REFUSED)
    from sapwood_kernels.compiled.archive import machine_facts, pack

    configs = [_config(flags) for flags in arguments.worker]
    import torch

    if not torch.cuda.is_available():
        raise CliError("there is no CUDA GPU here: build where one of the kind is that the workers will have", REFUSED)
    facts = machine_facts(torch.cuda.get_device_capability(), str(torch.version.cuda))
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sapwood-kernels-") as folder:
        for flags, config in zip(arguments.worker, configs, strict=True):
            print(f"compiling for {flags}", flush=True)
            _rehearse(config, Path(folder), verbose=arguments.verbose)
        built = list(Path(folder).glob("flashinfer/.cache/flashinfer/*/*/cached_ops"))
        try:
            arguments.archive.parent.mkdir(parents=True, exist_ok=True)
            count = pack(arguments.archive, facts, Path(folder, "triton"), built[0] if built else Path(folder, "none"))
        except OSError as error:
            raise CliError(f"cannot write {arguments.archive}: {error.strerror}", FAILED) from None
    size = arguments.archive.stat().st_size / 1e6
    print(
        f"{arguments.archive}: {count.triton} of Triton's kernels and {count.flashinfer} of FlashInfer's libraries, "
        f"{size:.1f} MB, for compute capability {facts['compute capability']}, in {time.monotonic() - began:.0f} s"
    )
    return 0


def _config(flags: str) -> str:
    """A worker's configuration as JSON. Raises CliError."""
    from sapwood_common.errors import ConfigError
    from sapwood_common.settings.config import build_parser, given_settings, load_config
    from sapwood_worker.config import WorkerConfig
    from sapwood_worker.settings import Kernels

    try:
        given = build_parser(WorkerConfig, "--worker", "").parse_args(shlex.split(flags))
        config = load_config(WorkerConfig, given_settings(WorkerConfig, given), given.config)
    except (ConfigError, ValueError) as error:
        raise CliError(f'--worker "{flags}": {error}', REFUSED) from None
    if config.ranks > 1:
        raise CliError(
            f'--worker "{flags}": kernels are built on one GPU; a model that is split compiles its own', REFUSED
        )
    changed = {"load_format": "dummy", "device": "cuda", "kernels": Kernels(wait=True)}
    return config.model_copy(update=changed).model_dump_json()


def _rehearse(config: str, folder: Path, *, verbose: bool) -> None:
    """Runs a worker's model in a process that compiles into the folder. Raises CliError."""
    places = {"TRITON_CACHE_DIR": str(folder / "triton"), "FLASHINFER_WORKSPACE_BASE": str(folder / "flashinfer")}
    done = subprocess.run(
        python_command("-m", "sapwood_worker.model.rehearsal"),
        env=python_environment(places),
        input=config,
        stdout=subprocess.DEVNULL,
        stderr=None if verbose else subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        said = (done.stderr or "").strip().splitlines()
        raise CliError(f"the model could not be run: {said[-1] if said else f'exit code {done.returncode}'}", FAILED)
