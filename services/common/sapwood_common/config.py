"""Configuration of a service: one pydantic-settings class is the one source of flags, variables, YAML keys and defaults.

A value comes from, first match wins: a flag (``--max-running 8``), a variable (``SAPWOOD_WORKER_MAX_RUNNING=8``), the YAML
file named by ``--config``, the default in the class. ``--help`` is written from the class.
"""

from __future__ import annotations

import argparse
import sys
import types
import typing
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, SettingsConfigDict

from sapwood_common.errors import ConfigError

ConfigT = TypeVar("ConfigT", bound="ServiceConfig")


class ServiceConfig(BaseSettings):
    """What every service can be told. Frozen: nothing changes it after construction."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 for all.")
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
    drain_timeout: float = Field(
        30.0, ge=0, description="Seconds that running requests get to finish after SIGTERM before they are cut off."
    )

    @property
    def health_address(self) -> str | None:
        """Where the health check alone is served, as ``host:port``; None: nowhere."""
        return None if self.health_port is None else f"{self.health_host}:{self.health_port}"


def flag_of(name: str) -> str:
    """The command-line flag of a field."""
    return "--" + name.replace("_", "-")


def variable_of(cls: type[ServiceConfig], name: str) -> str:
    """The environment variable of a field."""
    return f"{cls.model_config.get('env_prefix', '')}{name}".upper()


def build_parser(cls: type[ServiceConfig], program: str, description: str) -> argparse.ArgumentParser:
    """An argument parser with one flag a field; each help line ends with the variable and the default."""
    parser = argparse.ArgumentParser(prog=program, description=description, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="YAML file with any of these settings (field: value).")
    for name, field in cls.model_fields.items():
        text = f"{field.description} [{variable_of(cls, name)}; default: {_shown_default(field)}]".replace("%", "%%")
        choices = _choices(field.annotation)
        if field.annotation is bool:
            parser.add_argument(flag_of(name), dest=name, action=argparse.BooleanOptionalAction, help=text)
        elif get_origin(field.annotation) is tuple:
            parser.add_argument(flag_of(name), dest=name, nargs="*", metavar=_metavar(name), help=text)
        else:
            metavar = "{" + ",".join(choices) + "}" if choices else _metavar(name)
            parser.add_argument(flag_of(name), dest=name, metavar=metavar, help=text)
    return parser


def load_config(cls: type[ConfigT], arguments: argparse.Namespace) -> ConfigT:
    """The configuration that flags, environment, YAML file and defaults make together.

    Raises:
        ConfigError: A value is missing or wrong; the message names flag and variable.
    """
    given = {name: getattr(arguments, name) for name in cls.model_fields if getattr(arguments, name) is not None}
    from_file = _read_yaml(Path(arguments.config)) if arguments.config else {}
    unknown = sorted(set(from_file) - set(cls.model_fields))
    if unknown:
        raise ConfigError(f"{arguments.config}: unknown setting {unknown[0]!r}")
    import os

    set_in_environment = {name for name in cls.model_fields if variable_of(cls, name) in os.environ}
    values = {name: value for name, value in from_file.items() if name not in set_in_environment} | given
    try:
        return cls(**values)
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(cls, dict(item)) for item in error.errors())) from None
    except Exception as error:  # pydantic-settings' own error for an undecodable variable
        raise ConfigError(str(error)) from error


def parse_config(cls: type[ConfigT], program: str, description: str, argv: list[str] | None = None) -> ConfigT:
    """Parses the command line; on a wrong value prints one line to standard error and exits 2."""
    parser = build_parser(cls, program, description)
    try:
        return load_config(cls, parser.parse_args(sys.argv[1:] if argv is None else argv))
    except ConfigError as error:
        parser.exit(2, f"{program}: error: {error}\n")


def _explain(cls: type[ServiceConfig], item: dict[str, Any]) -> str:
    name = str(item["loc"][0]) if item["loc"] else "configuration"
    shown = "" if item["type"] == "missing" else f" (got {item['input']!r})"
    return f"{flag_of(name)} / {variable_of(cls, name)}: {item['msg']}{shown}"


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"--config: cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"--config: {path} is not YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config: {path} must hold a mapping of settings")
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


def _metavar(name: str) -> str:
    return name.rsplit("_", 1)[-1].upper()
