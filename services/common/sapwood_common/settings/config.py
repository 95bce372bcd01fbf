"""Configuration of a service: one pydantic-settings class is the one source of flags, variables, YAML keys and defaults.

A value comes from, first match wins: a flag (``--max-running 8``), a variable (``SAPWOOD_WORKER_MAX_RUNNING=8``), the YAML
file named by ``--config``, the default in the class. ``--help`` is written from the class.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from sapwood_common.errors import ConfigError
from sapwood_common.settings.compound import Compound, Switch, shown, text_of
from sapwood_common.settings.flags import Kind, add_option
from sapwood_common.settings.needs import Needs, idle_settings
from sapwood_common.settings.retired import Retired, compound_of, in_environment, renewed, retired_parts
from sapwood_common.telemetry.shown_text import without_credentials

ConfigT = TypeVar("ConfigT", bound="ServiceConfig")


class TraceEndpoint(Compound):
    """Where traces go, and how many."""

    address: str | None = None
    ratio: float = Field(default=1.0, ge=0, le=1)


class HealthPort(Compound):
    """``--health-port``."""

    port: int | None = Field(default=None, ge=0, le=65535)
    host: str = "127.0.0.1"


class ServiceConfig(BaseSettings):
    """The settings of every service. Frozen: nothing changes them after construction.

    Attributes:
        needs: What settings need to have an effect.
        retired: What settings of the last version became, by their old names.
    """

    needs: ClassVar[tuple[Needs, ...]] = (
        Needs(
            ("trace_endpoint.ratio",), lambda config: config.trace_endpoint.address is not None, "without an address"
        ),
        Needs(("tls_cert", "tls_client_ca"), lambda config: config.tls_key is not None, "without {tls_key}"),
        Needs(("tls_key",), lambda config: config.tls_cert is not None, "without {tls_cert}"),
        Needs(("health_port.host",), lambda config: config.health_port.port is not None, "without a port"),
    )

    retired: ClassVar[Mapping[str, Retired]] = {
        **retired_parts("trace_endpoint", trace_ratio="ratio"),
        **retired_parts("health_port", health_host="host"),
    }

    model_config = SettingsConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    host: str = Field(
        "127.0.0.1",
        description="Address to listen on; 0.0.0.0 for all; unix:PREFIX for Unix sockets, where port N is the socket PREFIX:N.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe log line shown.")
    log_format: Literal["text", "json"] = Field(
        "text", description="Log lines for people (text) or for machines (json: one object a line, with trace ids)."
    )
    trace_endpoint: Annotated[TraceEndpoint, NoDecode] = Field(
        TraceEndpoint(),
        description="ADDRESS[,ratio=SHARE]: OTLP/gRPC collector that gets traces, such as 127.0.0.1:4317; none: no tracing. "
        "ratio: share kept of the traces that begin here; others follow their caller.",
    )
    tls_cert: Path | None = Field(None, description="PEM file with the server's certificate; none: plain text.")
    tls_key: Path | None = Field(None, description="PEM file with its private key.")
    tls_client_ca: Path | None = Field(
        None, description="PEM file with the CAs that clients' certificates must come from (mTLS); none asks for none."
    )
    health_port: Annotated[HealthPort, NoDecode] = Field(
        HealthPort(),
        description="PORT[,host=HOST]: port on which the gRPC health check alone is served, in plain text: for probes that speak "
        "no TLS; 0 takes a free one; none: health is on --port only. host: address that it listens on.",
    )
    grpc_server: Literal["sapwood", "grpcio"] = Field(
        "sapwood",
        description="What speaks gRPC on this service's ports: sapwood's own server on the event loop, or grpcio's, a fallback "
        "that takes more CPU time and has no rates and budgets a connection.",
    )
    drain_timeout: float = Field(
        30.0, ge=0, description="Seconds that running requests get to finish after SIGTERM before they are cut off."
    )

    @model_validator(mode="before")
    @classmethod
    def _renew(cls, values: Any) -> Any:
        return renewed(cls, cls.retired, values) if isinstance(values, Mapping) else values

    @property
    def health_address(self) -> str | None:
        """Where the health check alone is served, as ``host:port``; None: nowhere."""
        given = self.health_port
        return None if given.port is None else f"{given.host}:{given.port}"


def flag_of(name: str, prefix: str = "") -> str:
    """The command-line flag of a field, or of a part of one (``queue.wait``)."""
    name, _, part = name.partition(".")
    return f"--{prefix}{name.replace('_', '-')}{f' {part}' if part else ''}"


def variable_of(cls: type[ServiceConfig], name: str) -> str:
    """The environment variable of a field, or of the field that a part belongs to."""
    return f"{cls.model_config.get('env_prefix', '')}{name.partition('.')[0]}".upper()


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
        choices, kind = _choices(field.annotation), _kind(cls, name)
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
    for name, old in cls.retired.items():
        action: Any = argparse.BooleanOptionalAction if old.switch else "store"
        parser.add_argument(flag_of(name, prefix), dest=f"{prefix}{name}", action=action, help=argparse.SUPPRESS)


def given_settings(cls: type[ServiceConfig], arguments: argparse.Namespace, prefix: str = "") -> dict[str, Any]:
    """The fields whose flags were given, as argparse has them: text, a list of texts or a boolean.

    Flags of the last version stand under their present names; a warning names each.

    Raises:
        ConfigError: The value of a flag is malformed.
    """
    values = vars(arguments)
    names = (*cls.model_fields, *cls.retired)
    found = {name: value for name in names if (value := values.get(f"{prefix}{name}")) is not None}
    return _renewed(cls, found, lambda name: flag_of(name, prefix))


def load_config(cls: type[ConfigT], given: Mapping[str, Any], file: str | None = None, *, prefix: str = "") -> ConfigT:
    """The configuration that flags, environment, YAML file and defaults make together.

    Args:
        cls: The class of the configuration.
        given: Values by field, from flags; text is parsed.
        file: The YAML file.
        prefix: The beginning of the flags, for messages.

    Raises:
        ConfigError: A value is missing or wrong, or has no effect; the message names flag and variable.
    """
    from_file = {} if file is None else _read_yaml(Path(file), f"--{prefix}config")
    unknown = sorted(set(from_file) - set(cls.model_fields) - set(cls.retired))
    if unknown:
        raise ConfigError(f"{file}: unknown setting {unknown[0]!r}")
    variables = {name: variable_of(cls, name) for name in cls.model_fields}
    variables = {name: os.environ[variable] for name, variable in variables.items() if variable in os.environ}
    old = dict(in_environment(cls.retired, str(cls.model_config.get("env_prefix", ""))))
    # What an old variable is a part of: where no present variable gives the rest, the file does.
    rest = {cls.retired[name].setting for name in old}
    from_file = _renewed(cls, from_file, lambda name: f"{file}: {name}")
    values = {name: value for name, value in from_file.items() if name not in variables}
    old |= {name: value for name, value in (from_file | variables).items() if name in rest}
    values |= _renewed(cls, old, lambda name: variable_of(cls, name))
    values |= _renewed(cls, given, lambda name: flag_of(name, prefix))
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
        prefix: The beginning of the flags, for messages.

    Raises:
        ConfigError: A setting has no effect; the message names flag and variable of each that has none.
    """
    cls, values = type(config), dict(config)
    flags = {name: flag_of(name, prefix) for name in values}
    problems = []
    for name, what in idle_settings(config, needs):
        value = values.get(name)
        off = value is False or (isinstance(value, Switch) and not value and bool(cls.model_fields[name].default))
        named = flag_of(name, f"no-{prefix}") if off else flag_of(name, prefix)
        problems.append(f"{named} / {variable_of(cls, name)}: has no effect {what.format_map(flags)}")
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
        elif isinstance(value, Mapping):
            flags.append(f"{flag_of(name)}={text_of(value)}")
        else:
            flags.append(f"{flag_of(name)}={value}")
    return flags


def may_hold_secret(value: Any) -> bool:
    """True if a value belongs on no command line, which every user of the machine can read: URLs may have credentials."""
    return any("://" in str(item) for item in (value if isinstance(value, list | tuple) else (value,)))


def variables(cls: type[ServiceConfig], given: Mapping[str, Any]) -> dict[str, str]:
    """The environment variables that give a service these settings, as :func:`command_line` gives them by flags."""
    texts = {name: text_of(value) if isinstance(value, Mapping) else value for name, value in given.items()}
    return {
        variable_of(cls, name): json.dumps(value) if isinstance(value, list | tuple | bool) else str(value)
        for name, value in texts.items()
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


_WITH_UNIT = re.compile(r"\s*[-+]?[0-9.]+\s*([A-Za-z%]+)\s*")


def _explain(cls: type[ServiceConfig], item: dict[str, Any], prefix: str) -> str:
    name = ".".join(map(str, item["loc"][:2] if _is_compound(cls, item["loc"]) else item["loc"][:1])) or "configuration"
    said, value = item["msg"].removeprefix("Value error, "), f"{item['input']!r}"
    shown = "" if item["type"] == "missing" or value in said else f" (got {value})"
    if item["type"] in ("int_parsing", "float_parsing") and (unit := _WITH_UNIT.fullmatch(str(item["input"]))):
        shown += ": a share is a number from 0 to 1" if unit[1] == "%" else f": leave {unit[1]!r} away"
    return without_credentials(f"{flag_of(name, prefix)} / {variable_of(cls, name)}: {said}{shown}")


def _is_compound(cls: type[ServiceConfig], place: tuple[Any, ...]) -> bool:
    return bool(place) and place[0] in cls.model_fields and compound_of(cls, str(place[0])) is not None


def _renewed(cls: type[ServiceConfig], values: Mapping[str, Any], named: Callable[[str], str]) -> dict[str, Any]:
    try:
        return renewed(cls, cls.retired, values, named)
    except ValueError as error:
        raise ConfigError(str(error)) from error


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
    if isinstance(default, Compound):
        return shown(default)
    if isinstance(default, tuple):
        return " ".join(map(str, default)) or "none"
    return str(default)


def _choices(annotation: Any) -> tuple[str, ...]:
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(arm for arm in get_args(annotation) if arm is not type(None))
    return tuple(map(str, get_args(annotation))) if get_origin(annotation) is typing.Literal else ()


def _kind(cls: type[ServiceConfig], name: str) -> Kind:
    annotation, compound = cls.model_fields[name].annotation, compound_of(cls, name)
    if compound is not None and issubclass(compound, Switch):
        return "compound switch"
    if annotation is bool:
        return "switch"
    return "list" if get_origin(annotation) is tuple else "value"
