"""The services of a local cluster as the command line of `sapwood up` describes them.

Every flag of a service is one of `sapwood up`, with the service's name before it: ``--worker-max-running`` is a worker's
``--max-running``, and both are SAPWOOD_WORKER_MAX_RUNNING. Imports what the services need, so only that verb imports it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic

from sapwood.cli.errors import REFUSED, CliError
from sapwood_common.errors import ConfigError
from sapwood_common.settings.compound import parts_of
from sapwood_common.settings.config import (
    ConfigT,
    add_settings,
    command_line,
    given_settings,
    load_config,
    may_hold_secret,
    variables,
)
from sapwood_common.settings.retired import compound_of
from sapwood_router.config import RouterConfig
from sapwood_tokenizer.config import TokenizerConfig
from sapwood_worker.config import WorkerConfig

_OF_ALL_WORKERS = "Ports are the first worker's; each further one takes the next."


@dataclass(frozen=True)
class Service(Generic[ConfigT]):
    """One service's settings.

    Attributes:
        name: ``router``, ``tokenizer`` or ``worker``.
        given: The values of `sapwood up`'s flags and variables by field, from :func:`given_settings`.
        file: The service's YAML file.
        config: The configuration made of these, the service's own variables and its defaults.
    """

    name: str
    given: dict[str, Any]
    file: str | None
    config: ConfigT

    def command_line(self, changes: Mapping[str, Any]) -> list[str]:
        """The flags of its process; ``changes`` replace the values of some fields. :meth:`environment` has the rest."""
        file = [] if self.file is None else [f"--config={self.file}"]
        settings = self._changed(changes)
        return [*file, *command_line({name: each for name, each in settings.items() if not may_hold_secret(each)})]

    def environment(self, changes: Mapping[str, Any]) -> dict[str, str]:
        """The variables of its process: settings that may hold credentials, which stand on no command line."""
        settings = self._changed(changes)
        return variables(type(self.config), {name: each for name, each in settings.items() if may_hold_secret(each)})

    def ports(self, further: int = 0) -> dict[str, int]:
        """Its ports by field, for process number ``further`` of the service, counted from 0."""
        values = {name: value for name, value in self.config.model_dump().items() if name.endswith("port")}
        ports = {name: value["port"] if isinstance(value, dict) else value for name, value in values.items()}
        return {name: port + further if port else 0 for name, port in ports.items() if port is not None}

    def host_of(self, port: str) -> str:
        """The address on which it listens on the port of that field."""
        hosts = self.config.model_dump()
        if isinstance(hosts.get(port), dict):
            return str(hosts[port]["host"])
        return str(hosts.get(port.removesuffix("port") + "host") or hosts["host"])

    def _changed(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """The given settings with changes; of a setting of several parts the first is changed."""
        settings = {**self.given, **changes}
        for name, value in changes.items():
            compound = compound_of(type(self.config), name) if name in self.given else None
            if compound is not None:
                settings[name] = {**parts_of(compound, self.given[name]), next(iter(compound.model_fields)): value}
        return settings

    def reworded(self, line: str) -> str:
        """A line that the service writes, its flags named as `sapwood up` names them."""
        names = "|".join(name.replace("_", "-") for name in type(self.config).model_fields)
        return re.sub(rf"(?<![\w-])--(no-)?({names})(?![\w-])", rf"--\1{self.name}-\2", line)


@dataclass(frozen=True)
class Services:
    """The services of a cluster.

    Attributes:
        router: The one router.
        tokenizer: The one tokenizer.
        worker: The settings of each worker.
        workers: The number of workers.
        front: The router's name in logs.
        roles: The role of each worker; empty: the role in its settings.
        gpus: CUDA_VISIBLE_DEVICES of each worker; empty: as it is here.
    """

    router: Service[RouterConfig]
    tokenizer: Service[TokenizerConfig]
    worker: Service[WorkerConfig]
    workers: int
    front: str = "router"
    roles: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()

    @property
    def drain_timeout(self) -> float:
        """Seconds after which every service has ended its requests."""
        return max(service.config.drain_timeout for service in (self.router, self.tokenizer, self.worker))


def add_service_flags(parser: argparse.ArgumentParser) -> None:
    """Adds every flag of every service, in a group for each; a service's port has a flag of `sapwood up` already."""
    router = parser.add_argument_group("router", "--router-workers and --router-tokenizer: besides those started here.")
    add_settings(router, RouterConfig, "router-")
    add_settings(parser.add_argument_group("tokenizer"), TokenizerConfig, "tokenizer-", without={"port"})
    add_settings(parser.add_argument_group("workers", _OF_ALL_WORKERS), WorkerConfig, "worker-", without={"port"})


def read_services(
    arguments: argparse.Namespace,
    router: dict[str, Any],
    tokenizer: dict[str, Any],
    worker: dict[str, Any],
    workers: int,
    front: str = "router",
    roles: tuple[str, ...] = (),
) -> Services:
    """The services as asked for.

    Args:
        arguments: Has the flags of :func:`add_service_flags`.
        router: Values from `sapwood up`'s own flags, by field, used where the service's flag is not given; None: no values.
        tokenizer: The same for the tokenizer.
        worker: The same for workers.
        workers: The number of workers.
        front: The router's name in logs.
        roles: The role of each worker; empty: the role in the worker's settings.

    Raises:
        CliError: A value is wrong.
    """
    return Services(
        _read(arguments, "router", RouterConfig, router),
        _read(arguments, "tokenizer", TokenizerConfig, tokenizer),
        _read(arguments, "worker", WorkerConfig, worker),
        workers,
        front,
        roles,
    )


def read_service(name: str, cls: type[ConfigT], given: dict[str, Any], file: str | None = None) -> Service[ConfigT]:
    """One service as asked for.

    Args:
        name: ``router``, ``tokenizer`` or ``worker``.
        cls: Its settings.
        given: Values by field.
        file: Its YAML file.

    Raises:
        CliError: A value is wrong.
    """
    try:
        return Service(name, given, file, load_config(cls, given, file, prefix=f"{name}-"))
    except ConfigError as error:
        raise CliError(str(error), REFUSED) from None


def _read(arguments: argparse.Namespace, name: str, cls: type[ConfigT], own: dict[str, Any]) -> Service[ConfigT]:
    prefix = f"{name}-"
    given = {field: value for field, value in own.items() if value is not None}
    try:
        given |= given_settings(cls, arguments, prefix)
    except ConfigError as error:
        raise CliError(str(error), REFUSED) from None
    return read_service(name, cls, given, vars(arguments)[f"{prefix}config"])
