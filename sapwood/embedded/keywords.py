"""A cluster as keyword arguments describe it: the settings of its services by their own names.

A setting goes to the service that has it (``max_running=8`` to the workers), to all where it means the same (``log_level``), and
with a service's name before it to that one alone (``router_log_level``, ``router_policy``). A setting without a keyword comes
from the service's own variable or default, as for `sapwood up`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc

from sapwood.cli.errors import CliError
from sapwood.cli.fetch import fetch_models
from sapwood.cli.services import Services, read_service
from sapwood.errors import InvalidArgumentError
from sapwood_common.cores import usable_cores
from sapwood_common.settings.compound import parts_of
from sapwood_common.settings.config import ServiceConfig
from sapwood_common.settings.retired import compound_of
from sapwood_router.config import RouterConfig
from sapwood_tokenizer.config import TokenizerConfig
from sapwood_worker.config import WorkerConfig

_CLASSES: dict[str, type[ServiceConfig]] = {
    "router": RouterConfig,
    "tokenizer": TokenizerConfig,
    "worker": WorkerConfig,
}
_OF_ALL = frozenset(
    (
        *("model", "revision", "served_model_name", "log_level", "log_format", "trace_endpoint", "trace_ratio"),
        *("drain_timeout", "grpc_server", "grammar_timeout", "random_seed"),
    )
)
"""Settings with the same meaning in all services that have them. Others that several have are taken with a service's name
only."""


def read_keywords(options: Mapping[str, Any], workers: int, defaults: Mapping[str, Any]) -> Services:
    """The services.

    Args:
        options: Settings by name; None is as if it was not there.
        workers: How many.
        defaults: Used where the options do not name the setting, in the same form.

    Raises:
        InvalidArgumentError: There is no such setting, or no such value; ``field`` is the name of the first.
    """
    if not isinstance(workers, int):
        raise _refusal(f"workers is {workers!r:.40}; it must be an integer of at least 1", "workers")
    if workers < 1:
        raise _refusal(f"workers is {workers}; it must be at least 1", "workers")
    given: dict[str, dict[str, Any]] = {name: {} for name in _CLASSES}
    for source in (defaults, options):
        for option, value in source.items():
            if value is not None:
                for service, field in _places(option):
                    given[service][field] = _joined(_CLASSES[service], field, given[service].get(field), _plain(value))
    given["worker"].setdefault("threads", max(1, usable_cores() // workers))
    files = {service: fields.pop("config", None) for service, fields in given.items()}
    try:
        return Services(
            read_service("router", RouterConfig, given["router"], files["router"]),
            read_service("tokenizer", TokenizerConfig, given["tokenizer"], files["tokenizer"]),
            read_service("worker", WorkerConfig, given["worker"], files["worker"]),
            workers,
        )
    except CliError as error:
        message = re.sub(r"--(no-)?(router|tokenizer|worker)-([\w-]+)", _as_option, error.message)
        if shared := "|".join(sorted(_OF_ALL & options.keys())):  # given once for all services: so it is named
            message = re.sub(rf"\b(?:router|tokenizer|worker)_({shared})\b", r"\1", message)
        named = re.match(r"\w+", message)
        raise _refusal(message, named[0] if named else None) from None


def provide_model(services: Services) -> None:
    """Makes sure that the services' model is on this machine: `demo` and models of the hub are fetched.

    Raises:
        InvalidArgumentError: There is none of this name, or it cannot be fetched.
    """
    try:
        fetch_models(services)
    except CliError as error:
        raise _refusal(error.message.removeprefix("--model: "), "model") from None


def _places(option: str) -> list[tuple[str, str]]:
    """Services and fields that an option sets. Raises InvalidArgumentError if there are none."""
    service, _, field = option.partition("_")
    if service in _CLASSES and (_takes(_CLASSES[service], field) or field == "config"):
        return [(service, field)]
    found = [name for name, cls in _CLASSES.items() if _takes(cls, option)]
    if len(found) > 1 and option not in _OF_ALL:
        named = " or ".join(f"{name}_{option}" for name in found)
        raise _refusal(f"several services have a {option}: {named}", option)
    if not found:
        known = {field for cls in _CLASSES.values() for field in cls.model_fields}
        known |= {f"{name}_{field}" for name, cls in _CLASSES.items() for field in cls.model_fields}
        similar = difflib.get_close_matches(option, sorted(known), n=1)
        raise _refusal(f"there is no option {option!r}" + (f"; {similar[0]}?" if similar else ""), option)
    return [(name, option) for name in found]


def _takes(cls: type[ServiceConfig], option: str) -> bool:
    return option in cls.model_fields or option in cls.retired


def _joined(cls: type[ServiceConfig], field: str, default: Any, value: Any) -> Any:
    """A value; of a setting of several parts, with those of the default that the value does not give."""
    compound = compound_of(cls, field) if field in cls.model_fields and default is not None else None
    return value if compound is None else parts_of(compound, default) | parts_of(compound, value)


def _plain(value: Any) -> Any:
    """A value as a command line can hold it."""
    if isinstance(value, Path):
        return str(value)
    return [*value] if isinstance(value, tuple) else value


def _as_option(flag: re.Match[str]) -> str:
    return f"{flag[2]}_{flag[3].replace('-', '_')}"


def _refusal(message: str, field: str | None) -> InvalidArgumentError:
    return InvalidArgumentError(grpc.StatusCode.INVALID_ARGUMENT, message, field=field)
