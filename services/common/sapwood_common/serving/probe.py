"""``python -m sapwood_common.serving.probe ADDRESS``: asks a service's standard gRPC health; exit code 0 if it serves, 1 if not.

Containers run it as their health check. ``--service liveness`` asks whether the process answers at all.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    sys.path.pop(0)  # ``python -m`` puts the current folder there: its numpy.py would be imported

import argparse
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sapwood_common.errors import ConfigError
from sapwood_net.sockets.tls import channel_credentials


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="probe", description="Asks a service whether it is healthy.")
    parser.add_argument("address", help="host:port")
    parser.add_argument("--service", default="", help="Health service to ask for; empty is the server as a whole.")
    parser.add_argument("--timeout", type=float, default=3.0, help="Seconds to wait. [default: 3]")
    parser.add_argument("--ca", type=Path, help="CA of the server's certificate; turns TLS on.")
    parser.add_argument("--cert", type=Path, help="Certificate to show.")
    parser.add_argument("--name", help="The host name in the server's certificate. [default: the host in the address]")
    parser.add_argument("--key", type=Path, help="Its key.")
    arguments = parser.parse_args()
    try:
        credentials = channel_credentials(arguments.ca, arguments.cert, arguments.key)
    except ConfigError as error:
        print(f"probe: error: {error}", file=sys.stderr)
        return 2
    if credentials is None:
        channel = grpc.insecure_channel(arguments.address)
    else:
        options = () if arguments.name is None else (("grpc.ssl_target_name_override", arguments.name),)
        channel = grpc.secure_channel(arguments.address, credentials, options=options)
    with channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=arguments.service), timeout=arguments.timeout
            )
        except grpc.RpcError as error:
            print(f"{error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    print(name)
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1


if __name__ == "__main__":
    sys.exit(main())
