"""The checks that `sapwood up` makes before it starts anything."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from ctypes.util import find_library
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from sapwood.cli.errors import REFUSED, CliError
from sapwood.cli.services import Services
from sapwood.cli.terminal import one_line
from sapwood_common.errors import ConfigError
from sapwood_common.models.gguf_file import GgufError, GgufFile
from sapwood_common.models.json_file import read_json_object
from sapwood_common.models.model_files import resolve_model
from sapwood_common.tenants.api_keys import parse_keys
from sapwood_net.sockets.listen import is_foreign, why_not
from sapwood_net.sockets.tls import server_tls
from sapwood_net.sockets.unix_socket import is_unix
from sapwood_router.config import RouterConfig
from sapwood_worker.model.families.names import CAUSAL, WRAPPERS, gguf_architectures, possible_architectures

_CUDA = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""What the driver makes; the second on Windows' Linux."""
_PORT_FLAGS = {("router", "port"): "--port", ("router", "http_port"): "--http-port"}


class _Wanted(NamedTuple):
    port: int
    host: str
    flag: str
    host_flag: str


def _wanted_ports(services: Services) -> list[_Wanted]:
    """All TCP ports that the services are to listen on, and the flags that choose them; 0 is a free one."""
    return [
        _Wanted(
            port,
            service.host_of(name),
            _PORT_FLAGS.get((service.name, name), f"--{service.name}-{name.replace('_', '-')}"),
            "--host" if service is services.router else f"--{service.name}-host",
        )
        for service, count in ((services.router, 1), (services.tokenizer, 1), (services.worker, services.workers))
        for index in range(count)
        for name, port in service.ports(index).items()
        if not is_unix(service.host_of(name))
    ]


@contextmanager
def claimed_ports(services: Services) -> Iterator[None]:
    """Checks the ports, and keeps every other `sapwood up` of this machine from them, which would find them free until they are
    listened on.

    A claim is a bound abstract Unix socket, which ends with the process; only Linux has those.

    Raises:
        CliError: As :func:`check_ports`; or another `sapwood up` has claimed one.
    """
    check_ports(services)
    with ExitStack() as claims:
        # In one order, so that of several processes one gets all that it asks for.
        for port, host, flag, _ in sorted(_wanted_ports(services)):
            if not port or not sys.platform.startswith("linux"):
                continue
            claim = claims.enter_context(socket.socket(socket.AF_UNIX))
            try:
                claim.bind(f"\0sapwood-up-{host}-{port}")
            except OSError:
                raise CliError(
                    f"cannot listen on {host}:{port}: another `sapwood up` has taken it; choose another with {flag}, "
                    "or free ones with --ports auto"
                ) from None
        yield


def check_ports(services: Services) -> None:
    """Finds what cannot be listened on before anything is started, so that the message can name its flag.

    Raises:
        CliError: A port is taken or meant twice, or an address is not this machine's.
    """
    seen: dict[int, str] = {}
    for port, host, flag, host_flag in _wanted_ports(services):
        if port > 65535:
            raise CliError(f"{flag}: the ports of {services.workers} workers exceed 65535", REFUSED)
        if port and port in seen:
            raise CliError(f"{flag} and {seen[port]} both mean port {port}", REFUSED)
        seen[port] = flag
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host.strip("[]"), port))
            except OSError as error:
                free = "" if is_foreign(error) else ", or free ones with --ports auto"
                raise CliError(
                    f"cannot listen on {host}:{port}: {why_not(error, host)}; choose another with "
                    f"{host_flag if is_foreign(error) else flag}{free}"
                ) from None


def check_model(services: Services) -> None:
    """Finds what the model's files and the flags alone show to be wrong, without torch; the model has to be here.

    Raises:
        CliError: There is no CUDA, the files cannot be read or are of an unknown architecture, or attention heads cannot be split
            over this many ranks.
    """
    config = services.worker.config
    if config.device.startswith("cuda") and find_library("cuda") is None and not any(map(Path.exists, _CUDA)):
        raise CliError(f"--worker-device {config.device}: no CUDA device is available here", REFUSED)
    given, ranks = services.worker.given, config.tensor_parallel
    try:
        path = resolve_model(given.get("model", config.model), given.get("revision", config.revision), may_fetch=False)
    except ConfigError:
        return  # the worker says why
    heads = _attention_heads(path)
    if heads is not None and heads % ranks and not config.data_parallel_attention:
        raise CliError(
            f"--tensor-parallel {ranks}: the model has {heads} attention heads, which so many ranks cannot share",
            REFUSED,
        )


def _attention_heads(path: Path) -> int | None:
    """None: the files do not say it. Raises CliError if they cannot be read, or are of an unknown architecture."""
    try:
        if path.is_dir():
            raw = read_json_object(path / "config.json")
            _check_architecture(raw.get("architectures"), path / "config.json")
            inner = raw.get("text_config")
            found = {**raw, **(inner if isinstance(inner, dict) else {})}.get("num_attention_heads")
        else:
            file = GgufFile(path)
            name = file.metadata.get("general.architecture")
            found = file.metadata.get(f"{name}.attention.head_count")
            file.close()
            _check_gguf_architecture(name, path)
    except (ConfigError, GgufError) as error:
        raise CliError(f"--model: {error}", REFUSED) from None
    return found if isinstance(found, int) and found > 0 else None


def _check_architecture(names: object, path: Path) -> None:
    known = possible_architectures()
    name = names[0] if isinstance(names, list) and names else "(none)"
    if known is None or not isinstance(name, str) or name in known or name.endswith(WRAPPERS):
        return
    alike = get_close_matches(name, [each for each in known if len(each) > len(CAUSAL) and each.endswith(CAUSAL)], 3)
    shown = f"; did you mean {' or '.join(alike)}?" if alike else ""
    raise CliError(
        f"--model: {path}: architecture {one_line(name)} is not supported{shown}; `sapwood docs models` lists those that are",
        REFUSED,
    )


def _check_gguf_architecture(name: object, path: Path) -> None:
    known = gguf_architectures()
    if known is None or name in known:
        return
    shown = "(none)" if name is None else one_line(str(name))
    raise CliError(
        f"--model: {path}: general.architecture {shown} is not read from GGUF files; `sapwood docs models` lists those that are, "
        "and further ones that are read from Hugging Face's files",
        REFUSED,
    )


def check_files(services: Services) -> None:
    """Reads keys and certificates as the services will, minutes before they would.

    Raises:
        CliError: A file is missing or wrong.
    """
    for service in (services.router, services.tokenizer, services.worker):
        config = service.config
        try:
            server_tls(config.tls_cert, config.tls_key, config.tls_client_ca)
            if isinstance(config, RouterConfig) and config.api_keys is not None:
                parse_keys(config.api_keys)
        except ConfigError as error:
            raise CliError(service.reworded(str(error)), REFUSED) from None
