"""grpcio's asyncio server with a health servicer and nothing else: what the same floods do to it."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--cert", type=Path)
    parser.add_argument("--key", type=Path)
    args = parser.parse_args()
    server = grpc.aio.server()
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    address = f"127.0.0.1:{args.port}"
    if args.cert is None:
        server.add_insecure_port(address)
    else:
        pair = (args.key.read_bytes(), args.cert.read_bytes())
        server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main())
