"""`sapwood up -c FILE`: a cluster written down, and `sapwood config`, which prints the one that flags, variables and file make.

The file has the flags of `sapwood up` without their dashes. A service's settings may stand under its name::

    model: Qwen/Qwen3-0.6B
    workers: 2
    worker:
      max-running: 8
    router-policy: prefix_hash

Flags come first, then environment variables, then the file. So the file is read into those variables that are not set.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sapwood.cli.errors import REFUSED, CliError

if TYPE_CHECKING:
    from sapwood.cli.services import Service, Services

_OWN = (
    "model", "revision", "served-model-name", "workers", "roles", "no-router", "tensor-parallel", "threads", "policy",
    "random-seed", "host", "port", "http-port", "tokenizer-port", "worker-port", "ports", "log-level", "drain-timeout",
)  # fmt: skip
"""`sapwood up`'s own flags."""
VARIABLE = "SAPWOOD_UP_CONFIG"
_MOST_NAMES = 1000
"""Names in one place up to which they are compared with each other."""


def add_file_flag(parser: argparse.ArgumentParser) -> None:
    """Adds the flag, which :func:`read_cluster_file` reads before the others are known."""
    parser.add_argument(
        "-c",
        "--config",
        metavar="FILE",
        help="YAML file with any of these flags, without their dashes; a service's may stand under its name (worker: "
        f"{{max-running: 8}}). Flags and variables come before it. `sapwood config` prints one. [{VARIABLE}; default: none]",
    )


def read_cluster_file(words: Sequence[str]) -> None:
    """Sets the variables that stand for the file which a command line names, if it names one.

    Raises:
        CliError: The file cannot be read, or has a setting that does not exist.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument("-c", "--config", default=os.environ.get(VARIABLE))
    try:
        file = finder.parse_known_args(list(words))[0].config
    except argparse.ArgumentError:  # said by the whole parser
        return
    if file is not None:
        for variable, value in _variables(file):
            os.environ.setdefault(variable, value)


def _variables(file: str) -> Iterator[tuple[str, str]]:
    import yaml

    class _Loader(yaml.SafeLoader):
        """Refuses a name that stands twice in one place: YAML would take the last value in silence."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            names = [self.construct_object(key, deep=True) for key, _ in node.value]
            twice = next((name for name in names if names.count(name) > 1), None) if len(names) < _MOST_NAMES else None
            if twice is not None:
                raise CliError(f"--config: {file}: {twice} is given twice; keep one", REFUSED)
            return super().construct_mapping(node, deep)

    from sapwood_common.settings.config import ServiceConfig, variables
    from sapwood_router.config import RouterConfig
    from sapwood_tokenizer.config import TokenizerConfig
    from sapwood_worker.config import WorkerConfig

    services: dict[str, type[ServiceConfig]] = {
        "router": RouterConfig,
        "tokenizer": TokenizerConfig,
        "worker": WorkerConfig,
    }
    try:
        content = yaml.load(Path(file).read_text(), _Loader)
    except OSError as error:
        raise CliError(f"--config: cannot read {file}: {error.strerror}", REFUSED) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CliError(f"--config: {file} is not YAML: {' '.join(str(error).split())}", REFUSED) from None
    if not isinstance(content, Mapping):
        raise CliError(f"--config: {file} must hold settings (name: value)", REFUSED)
    for name, value in _flat(content, file, services):
        if name in _OWN:
            if value is None:  # `model:` alone says nothing
                continue
            if isinstance(value, bool) and name != "no-router":
                value = str(value).lower()  # a text that the flag refuses: its 1 would be taken
            yield f"SAPWOOD_UP_{name.replace('-', '_').upper()}", _text(value)
            continue
        service, _, setting = name.partition("-")
        cls, field = services.get(service), setting.replace("-", "_")
        if cls is None or field not in (*cls.model_fields, *cls.retired):
            known = [
                *_OWN,
                *(f"{each}-{field.replace('_', '-')}" for each in services for field in services[each].model_fields),
            ]
            plain = name.lower().removeprefix("sapwood-").removeprefix("up-").lstrip("-")
            similar = difflib.get_close_matches(plain, known, n=1) or [
                each for each in known if each.endswith(f"-{name}")
            ]
            hint = f"; did you mean {similar[0]}?" if similar else ""
            if name in ("detach", "config"):
                hint = f"; --{name} stands on the command line only"
            raise CliError(f"--config: {file}: there is no setting {name!r}{hint}", REFUSED)
        if value is not None:
            yield from variables(cls, {field: value}).items()


def _flat(content: Mapping[Any, Any], file: str, services: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        name = str(key).replace("_", "-")
        if name not in services:
            yield name, value
        elif isinstance(value, Mapping):
            yield from ((f"{name}-{str(inner).replace('_', '-')}", each) for inner, each in value.items())
        elif value is not None:
            raise CliError(f"--config: {file}: {name} must hold settings (name: value)", REFUSED)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "1" if value else ""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def shown_services(services: Services, *, everything: bool, alone: bool = False) -> str:
    """The cluster as such a file, credentials left out.

    Args:
        services: The services from flags, variables and file.
        everything: Whether to show what is as it is by default.
        alone: Whether one worker is to run without a router.
    """
    import yaml

    sections = {
        service.name: _settings(service, everything)
        for service in (services.router, services.tokenizer, services.worker)
    }
    content: dict[str, Any] = {}
    if services.tokenizer.config.model == services.worker.config.model:
        content["model"] = _shown(services.worker.config.model)
        for service in (services.tokenizer, services.worker):
            sections[service.name].pop("model", None)
    if alone:  # the one port is chosen by a flag of `sapwood up`, not of a router
        content |= {"no-router": True, "http-port": services.router.config.http_port}
        sections["router"].pop("http-port", None)
    else:
        content["workers"] = services.workers
    if services.roles:
        content["roles"] = ",".join(services.roles)
    content |= {name: settings for name, settings in sections.items() if settings}
    return str(yaml.safe_dump(content, sort_keys=False, allow_unicode=True))


def _settings(service: Service[Any], everything: bool) -> dict[str, Any]:
    config = json.loads(service.config.model_dump_json(fallback=str))
    changed = json.loads(service.config.model_dump_json(exclude_defaults=not everything, fallback=str))
    # Flags are texts; a number or a switch is shown as one.
    given = {
        name: config[name] if isinstance(value, str) and isinstance(config.get(name), (int, float)) else value
        for name, value in service.given.items()
    }
    return {name.replace("_", "-"): _shown(value) for name, value in (changed | given).items()}


def _shown(value: Any) -> Any:
    from sapwood_common.telemetry.shown_text import without_credentials

    return without_credentials(value) if isinstance(value, str) else value
