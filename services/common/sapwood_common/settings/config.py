"""Configuration of a service: one pydantic-settings class is the one source of flags, variables, YAML keys and defaults.

A value comes from, first match wins: a flag (``--max-running 8``), a variable (``SAPWOOD_WORKER_MAX_RUNNING=8``), the YAML
file named by ``--config``, the default in the class. ``--help`` is written from the class.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, SettingsConfigDict

from sapwood_common.errors import ConfigError
from sapwood_common.settings.flags import Kind, add_option
from sapwood_common.settings.needs import Needs, idle_settings
from sapwood_common.telemetry.shown_text import without_credentials

ConfigT = TypeVar("ConfigT", bound="ServiceConfig")


class ServiceConfig(BaseSettings):
    """What every service can be told. Frozen: nothing changes it after construction.

    Attributes:
        needs: What settings need to have an effect.
    """

    needs: ClassVar[tuple[Needs, ...]] = (
        Needs(("trace_ratio",), lambda config: config.trace_endpoint is not None, "without {trace_endpoint}"),
        Needs(("tls_cert", "tls_client_ca"), lambda config: config.tls_key is not None, "without {tls_key}"),
        Needs(("tls_key",), lambda config: config.tls_cert is not None, "without {tls_cert}"),
        Needs(("health_host",), lambda config: config.health_port is not None, "without {health_port}"),
    )

    model_config = SettingsConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    host: str = Field(
        "127.0.0.1",
        description="Address to listen on; 0.0.0.0 for all; unix:PREFIX for Unix sockets, where port N is the socket PREFIX:N.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe log line shown.")
    log_format: Literal["text", "json"] = Field(
        "text", description="Log lines for people (text) or for machines (json: one object a line, with trace ids)."
    )
    trace_endpoint: str | None = Field(
        None, description="OTLP/gRPC collector that traces are sent to, such as 127.0.0.1:4317; none: no tracing."
    )
    trace_ratio: float = Field(
        1.0, ge=0, le=1, description="Share of traces kept of those that begin here; others follow their caller."
    )
    tls_cert: Path | None = Field(None, description="PEM file with the server's certificate; none: plain text.")
    tls_key: Path | None = Field(None, description="PEM file with its private key.")
    tls_client_ca: Path | None = Field(
        None, description="PEM file with the CAs that clients' certificates must come from (mTLS); none asks for none."
    )
    health_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port on which the gRPC health check alone is served, in plain text: for probes that speak no TLS; 0 takes a "
        "free one; none: health is on --port only.",
    )
    health_host: str = Field("127.0.0.1", description="Address that --health-port listens on.")
    grpc_server: Literal["sapwood", "grpcio"] = Field(
        "sapwood",
        description="What speaks gRPC on this service's ports: sapwood's own server on the event loop, or grpcio's, a fallback "
        "that takes more CPU time and has no rates and budgets a connection.",
    )
    drain_timeout: float = Field(
        30.0, ge=0, description="Seconds that running requests get to finish after SIGTERM before they are cut off."
    )

    @property
    def health_address(self) -> str | None:
        """Where the health check alone is served, as ``host:port``; None: nowhere."""
        return None if self.health_port is None else f"{self.health_host}:{self.health_port}"


def flag_of(name: str, prefix: str = "") -> str:
    """The command-line flag of a field."""
    return f"--{prefix}{name.replace('_', '-')}"


def variable_of(cls: type[ServiceConfig], name: str) -> str:
    """The environment variable of a field."""
    return f"{cls.model_config.get('env_prefix', '')}{name}".upper()


def add_settings(
    parser: argparse._ActionsContainer,
    cls: type[ServiceConfig],
    prefix: str = "",
    without: Collection[str] = (),
) -> None:
    """Adds ``--config`` and one flag a field; each help line ends with the variable and the default.

    Args:
        parser: Gets the flags; :func:`given_settings` reads what is given.
        cls: The fields.
        prefix: Stands before each flag's name: ``worker-`` makes ``--worker-max-running``.
        without: Fields that get no flag.
    """
    config = "YAML file with any of these settings (field: value)."
    parser.add_argument(f"--{prefix}config", dest=f"{prefix}config", metavar="FILE", help=config)
    for name, field in cls.model_fields.items():
        if name in without:
            continue
        choices, kind = _choices(field.annotation), _kind(field.annotation)
        add_option(
            parser,
            flag_of(name, prefix),
            str(field.description),
            variable=variable_of(cls, name),
            shown_default=_shown_default(field),
            kind=kind,
            metavar="{" + ",".join(choices) + "}" if choices and kind == "value" else None,
            dest=f"{prefix}{name}",
            reads_variable=False,
        )


def given_settings(cls: type[ServiceConfig], arguments: argparse.Namespace, prefix: str = "") -> dict[str, Any]:
    """The fields whose flags were given, as argparse has them: text, a list of texts or a boolean."""
    values = vars(arguments)
    return {name: value for name in cls.model_fields if (value := values.get(f"{prefix}{name}")) is not None}


def load_config(cls: type[ConfigT], given: Mapping[str, Any], file: str | None = None, *, prefix: str = "") -> ConfigT:
    """The configuration that flags, environment, YAML file and defaults make together.

    Args:
        cls: The class of the configuration.
        given: Values by field, from flags; text is parsed.
        file: The YAML file.
        prefix: What the flags begin with, for messages.

    Raises:
        ConfigError: A value is missing or wrong, or has no effect; the message names flag and variable.
    """
    from_file = {} if file is None else _read_yaml(Path(file), f"--{prefix}config")
    unknown = sorted(set(from_file) - set(cls.model_fields))
    if unknown:
        raise ConfigError(f"{file}: unknown setting {unknown[0]!r}")
    in_environment = {name for name in cls.model_fields if variable_of(cls, name) in os.environ}
    values = {name: value for name, value in from_file.items() if name not in in_environment} | dict(given)
    try:
        config = cls(**values)
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(cls, dict(item), prefix) for item in error.errors())) from None
    except Exception as error:  # pydantic-settings' own error for an undecodable variable
        raise ConfigError(str(error)) from error
    refuse_idle(config, cls.needs, prefix=prefix)
    return config


def refuse_idle(config: ServiceConfig, needs: Iterable[Needs], *, prefix: str = "") -> None:
    """Refuses settings that would change nothing.

    Args:
        config: The settings.
        needs: What they need.
        prefix: What the flags begin with, for messages.

    Raises:
        ConfigError: A setting has no effect; the message names flag and variable of each that has none.
    """
    cls, values = type(config), dict(config)
    flags = {name: flag_of(name, prefix) for name in values}
    problems = []
    for name, what in idle_settings(config, needs):
        shown = flag_of(name, f"no-{prefix}") if values[name] is False else flags[name]
        problems.append(f"{shown} / {variable_of(cls, name)}: has no effect {what.format_map(flags)}")
    if problems:
        raise ConfigError("; ".join(problems))


def command_line(given: Mapping[str, Any]) -> list[str]:
    """The flags that give a service these settings: the reverse of :func:`given_settings`."""
    flags: list[str] = []
    for name, value in given.items():
        if isinstance(value, bool):
            flags.append(flag_of(name) if value else flag_of(f"no_{name}"))
        elif isinstance(value, list):
            flags += [flag_of(name), *map(str, value)]
        else:
            flags.append(f"{flag_of(name)}={value}")
    return flags


def may_hold_secret(value: Any) -> bool:
    """True if a value belongs on no command line, which every user of the machine can read: URLs may have credentials."""
    return any("://" in str(item) for item in (value if isinstance(value, list | tuple) else (value,)))


def variables(cls: type[ServiceConfig], given: Mapping[str, Any]) -> dict[str, str]:
    """The environment variables that give a service these settings, as :func:`command_line` gives them by flags."""
    return {
        variable_of(cls, name): json.dumps(value) if isinstance(value, list | tuple | bool) else str(value)
        for name, value in given.items()
    }


def build_parser(cls: type[ServiceConfig], program: str, description: str) -> argparse.ArgumentParser:
    """The parser of a service's command line."""
    usage = "%(prog)s [FLAG ...]"  # all of them would hide what an error says
    parser = argparse.ArgumentParser(prog=program, usage=usage, description=description, allow_abbrev=False)
    add_settings(parser, cls)
    return parser


def parse_config(cls: type[ConfigT], program: str, description: str, argv: list[str] | None = None) -> ConfigT:
    """Parses the command line; on a wrong flag or value prints a line about it to standard error and exits 2."""
    parser = build_parser(cls, program, description)
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        similar = difflib.get_close_matches(unknown[0].partition("=")[0], flags, n=1, cutoff=0.8)
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{f'; did you mean {similar[0]}?' if similar else ''}")
    try:
        return load_config(cls, given_settings(cls, arguments), arguments.config)
    except ConfigError as error:
        parser.exit(2, f"{program}: error: {error}\n")


def _explain(cls: type[ServiceConfig], item: dict[str, Any], prefix: str) -> str:
    name = str(item["loc"][0]) if item["loc"] else "configuration"
    said, value = item["msg"].removeprefix("Value error, "), f"{item['input']!r}"
    shown = "" if item["type"] == "missing" or value in said else f" (got {value})"
    return without_credentials(f"{flag_of(name, prefix)} / {variable_of(cls, name)}: {said}{shown}")


def _read_yaml(path: Path, flag: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{flag}: cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{flag}: {path} is not YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{flag}: {path} must hold a mapping of settings")
    return {str(key).replace("-", "_"): value for key, value in content.items()}


def _shown_default(field: FieldInfo) -> str:
    if field.is_required():
        return "none, required"
    default = field.get_default(call_default_factory=True, validated_data={})
    if default is None:
        return "none"
    if isinstance(default, tuple):
        return " ".join(map(str, default)) or "none"
    return str(default)


def _choices(annotation: Any) -> tuple[str, ...]:
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(arm for arm in get_args(annotation) if arm is not type(None))
    return tuple(map(str, get_args(annotation))) if get_origin(annotation) is typing.Literal else ()


def _kind(annotation: Any) -> Kind:
    if annotation is bool:
        return "switch"
    return "list" if get_origin(annotation) is tuple else "value"
