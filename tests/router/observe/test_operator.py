"""An operator at a router that asks its clients for certificates, and at one that serves several models."""

import asyncio
import re

import trustme

from sapwood.cli.errors import REFUSED, UNREACHABLE
from sapwood.cli.main import main
from sapwood.v1 import router_pb2
from sapwood_testing.router.fake_worker import FakeWorker


async def test_the_command_line_shows_its_certificate(make_cluster, tmp_path, capsys) -> None:
    authority = trustme.CA()
    ca = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(ca)
    files = {}
    for name in ("router", "operator"):
        issued = authority.issue_cert("127.0.0.1", common_name=name)
        files[name] = cert, key = tmp_path / f"{name}.pem", tmp_path / f"{name}.key"
        issued.cert_chain_pems[0].write_to_path(cert)
        issued.private_key_pem.write_to_path(key)
    cert, key = files["router"]
    async with make_cluster(1, tls_cert=cert, tls_key=key, tls_client_ca=ca, admin_port=0) as cluster:
        address = f"127.0.0.1:{cluster.router.admin_port}"
        command = ["router", "workers", "list", "--address", address, "--ca", str(ca)]
        cert, key = map(str, files["operator"])
        assert await asyncio.to_thread(main, [*command, "--cert", cert, "--key", key]) == 0
        assert cluster.workers[0].address in capsys.readouterr().out
        assert await asyncio.to_thread(main, command) == UNREACHABLE
        assert await asyncio.to_thread(main, [*command, "--cert", cert]) == REFUSED
        assert await asyncio.to_thread(main, [*command, "--cert", cert, "--key", str(tmp_path / "none")]) == REFUSED
        assert "none" in capsys.readouterr().err


async def test_a_route_is_explained_for_a_model_and_a_session(make_cluster, capsys) -> None:
    async with make_cluster(1, policy="consistent_hash") as cluster:
        other = FakeWorker("other")
        await other.start()
        try:
            await cluster.stub.RegisterWorker(router_pb2.RegisterWorkerRequest(address=other.address))
            await cluster.ready()
            command = ["router", "route", "explain", "hi", "--address", f"127.0.0.1:{cluster.router.grpc_port}"]
            assert await asyncio.to_thread(main, command) == REFUSED  # which model?
            assert await asyncio.to_thread(main, [*command, "--model", "other", "--session-id", "s"]) == 0
            shown = capsys.readouterr().out
            assert re.search(rf"-> +{other.address}", shown)
            assert "reason: session (consistent_hash)" in shown
        finally:
            await other.kill()
