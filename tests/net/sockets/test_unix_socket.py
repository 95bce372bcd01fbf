"""Unix sockets that stand for ports."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sapwood_common.errors import ConfigError
from sapwood_common.serving.server import Implementation, ServiceServer
from sapwood_common.telemetry.metrics import MetricSet, MetricsServer
from sapwood_net.sockets.port import Port
from sapwood_net.sockets.unix_socket import listen_unix, port_of


def test_a_free_number_is_taken_and_a_taken_one_refused(tmp_path: Path) -> None:
    host = f"unix:{tmp_path}/s"
    with listen_unix(host, 0, 1) as listener:
        number = port_of(listener)
        assert (tmp_path / f"s:{number}").is_socket()
        with pytest.raises(ConfigError, match=f"s:{number}"):
            listen_unix(host, number, 1)


def test_what_a_dead_process_left_behind_is_replaced(tmp_path: Path) -> None:
    host = f"unix:{tmp_path}/s"
    listen_unix(host, 7, 1).close()
    assert (tmp_path / "s:7").is_socket()
    with listen_unix(host, 7, 1) as again, socket.socket(socket.AF_UNIX) as client:
        client.connect(f"{tmp_path}/s:7")
        assert port_of(again) == 7


def test_a_place_that_cannot_be_is_a_configuration_error(tmp_path: Path) -> None:
    for host in (f"unix:{tmp_path}/none/s", f"unix:/{'x' * 200}"):
        with pytest.raises(ConfigError, match="cannot listen on unix:"):
            listen_unix(host, 0, 1)
    with pytest.raises(ConfigError, match="one process"):
        Port(f"unix:{tmp_path}/s", 1, reuse=True).open(asyncio.Protocol)


@pytest.mark.parametrize("implementation", ["sapwood", "grpcio"])
async def test_a_service_is_reached_at_host_and_port_as_ever(tmp_path: Path, implementation: Implementation) -> None:
    host = f"unix:{tmp_path}/s"
    server = ServiceServer(host, 0, [], implementation=implementation)
    address = f"{host}:{await server.start()}"
    await server.set_serving(True)
    async with grpc.aio.insecure_channel(address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    await server.stop()


def test_metrics_are_shown_there_too(tmp_path: Path) -> None:
    metrics = MetricSet()
    metrics.gauge("level", "Level.").at().set(7)
    server = MetricsServer(metrics.registry, f"unix:{tmp_path}/s", 0)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(f"{tmp_path}/s:{server.port}")
        client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        with client.makefile("rb") as page:
            assert b"level 7.0" in page.read()
    server.close()
