"""What is looked at before `sapwood up` starts anything."""

from __future__ import annotations

import socket

from sapwood.cli.errors import REFUSED, CliError
from sapwood.cli.services import Services
from sapwood_common.unix_socket import is_unix

_PORT_FLAGS = {("router", "port"): "--port", ("router", "http_port"): "--http-port"}


def check_ports(services: Services) -> None:
    """Finds a taken port before anything is started, so that the message can name its flag.

    Raises:
        CliError: One is taken, or meant twice.
    """
    wanted = [
        (
            _PORT_FLAGS.get((service.name, name), f"--{service.name}-{name.replace('_', '-')}"),
            service.host_of(name),
            port,
        )
        for service, count in ((services.router, 1), (services.tokenizer, 1), (services.worker, services.workers))
        for index in range(count)
        for name, port in service.ports(index).items()
        if port and not is_unix(service.host_of(name))
    ]
    seen: dict[int, str] = {}
    for flag, host, port in wanted:
        if port > 65535:
            raise CliError(f"{flag}: the ports of {services.workers} workers exceed 65535", REFUSED)
        if port in seen:
            raise CliError(f"{flag} and {seen[port]} both mean port {port}", REFUSED)
        seen[port] = flag
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host.strip("[]"), port))
            except OSError as error:
                raise CliError(
                    f"cannot listen on {host}:{port} ({error.strerror}); choose another with {flag}, or free ones with "
                    "--ports auto"
                ) from None
