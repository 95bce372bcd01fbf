"""TLS and mTLS between real services, and certificates that are replaced while they run."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sapwood.cli.errors import UNREACHABLE
from sapwood.cli.main import main
from sapwood.client import SapwoodError


def _replace(path: Path, blob: bytes) -> None:
    fresh = path.with_suffix(path.suffix + ".new")
    fresh.write_bytes(blob)
    fresh.rename(path)


class Authority:
    """A CA and the files of certificates it issued."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.ca = trustme.CA()
        self.folder = folder
        self.ca_file = folder / "ca.pem"
        self.ca.cert_pem.write_to_path(self.ca_file)

    def issue(self, name: str, *hosts: str) -> tuple[Path, Path]:
        """Certificate and key for 127.0.0.1, or ``hosts``, each replaced in one step as Kubernetes and cert-manager do."""
        folder = self.folder
        issued = self.ca.issue_cert(*(hosts or ("127.0.0.1", "localhost")), common_name=name)
        cert, key = folder / f"{name}.pem", folder / f"{name}.key"
        _replace(key, issued.private_key_pem.bytes())
        _replace(cert, b"".join(c.bytes() for c in issued.cert_chain_pems))
        return cert, key

    def credentials(self, *shown: Path) -> grpc.ChannelCredentials:
        """A client's credentials; ``shown``: certificate and key."""
        blobs = [path.read_bytes() for path in shown]
        return grpc.ssl_channel_credentials(self.ca_file.read_bytes(), *reversed(blobs))


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "pki")


@pytest.fixture(scope="module")
def secured(module_services, authority: Authority):
    """Router with TLS for all clients; behind it mutual TLS."""
    files = {name: authority.issue(name) for name in ("router", "tokenizer")}
    files["worker"] = authority.issue("worker", "worker.sapwood.internal")  # it is reached by its IP address

    def serving(name: str, *more: str) -> tuple[str, ...]:
        cert, key = files[name]
        return ("--tls-cert", str(cert), "--tls-key", str(key), *more)

    inside = ("--tls-client-ca", str(authority.ca_file))
    cert, key = files["router"]
    peers = ("--peer-ca", str(authority.ca_file), "--peer-cert", str(cert), "--peer-key", str(key))
    peers += ("--worker-name", "worker.sapwood.internal")
    cluster = module_services(
        router=serving("router", *peers), tokenizer=serving("tokenizer", *inside), worker=serving("worker", *inside)
    )
    cluster.wait_ready()
    return cluster


def probe(address: str, *flags: object) -> int:
    command = [sys.executable, "-m", "sapwood_common.serving.probe", address, "--timeout", "30", *map(str, flags)]
    return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode


def test_a_request_crosses_mutual_tls_and_nobody_else_gets_in(secured, connect, authority: Authority, capsys) -> None:
    client = connect(secured.grpc, credentials=authority.credentials())
    assert client.generate("hello", max_tokens=3, ignore_eos=True).text() is not None
    with pytest.raises(SapwoodError, match="UNAVAILABLE"):
        connect(secured.grpc).list_models()  # plain text
    operator = ["router", "workers", "list", "--address", secured.grpc, "--ca", str(authority.ca_file)]
    assert main([*operator, "--server-name", "localhost"]) == 0
    assert secured.worker in capsys.readouterr().out
    assert main([*operator, "--server-name", "elsewhere"]) == UNREACHABLE
    stranger = Authority(authority.folder / "stranger")
    own = stranger.issue("stranger")
    cert, key = authority.issue("operator")
    for address, name in ((secured.tokenizer, "localhost"), (secured.worker, "worker.sapwood.internal")):
        ca = ("--ca", authority.ca_file, "--name", name)
        assert probe(address, *ca, "--cert", cert, "--key", key) == 0
        assert probe(address, *ca) == 1, "without a certificate"
        assert probe(address, *ca, "--cert", own[0], "--key", own[1]) == 1, "with a stranger's"
        assert probe(address) == 1, "plain text"


def test_new_certificates_are_taken_up_without_a_restart(secured, connect, authority: Authority) -> None:
    def shown(address: str) -> str:
        host, _, port = address.rpartition(":")
        return ssl.get_server_certificate((host, int(port)))

    before = {address: shown(address) for address in (secured.grpc, secured.http)}
    pid = secured.processes["router"].process.pid
    authority.issue("router")
    for address, old in before.items():
        deadline = time.monotonic() + 60
        while shown(address) == old:
            assert time.monotonic() < deadline, f"{address} still shows the old certificate"
            time.sleep(0.1)
    assert secured.processes["router"].process.pid == pid
    os.kill(pid, 0)
    client = connect(secured.grpc, credentials=authority.credentials())
    assert secured.processes["router"].find("TLS files have changed: (new connections) to the tokenizer")
    assert client.generate("hello", max_tokens=3, ignore_eos=True).text() is not None


def health(channel: grpc.Channel, service: str = "") -> int | None:
    """What the health check says; None if there is no connection."""
    with channel:
        try:
            stub = health_pb2_grpc.HealthStub(channel)
            return stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=60).status
        except grpc.RpcError:
            return None


def test_a_new_authority_for_clients_replaces_the_old_one_on_both_ports(
    start_process, authority: Authority, tmp_path: Path
) -> None:
    clients = tmp_path / "clients.pem"
    clients.write_bytes(authority.ca_file.read_bytes())
    cert, key = authority.issue("router")
    flags = ("--tls-cert", str(cert), "--tls-key", str(key), "--tls-client-ca", str(clients), "--health-port", "0")
    router = start_process("router", "--port", "0", "--http-port", "0", "--tokenizer", "127.0.0.1:1", *flags)
    address, web = (router.find(rf"{name} listening on ([\d.]+:\d+)") for name in ("gRPC", "HTTP"))
    # It has neither tokenizer nor worker, and says so to anybody who is let in.
    no, yes = health_pb2.HealthCheckResponse.NOT_SERVING, health_pb2.HealthCheckResponse.SERVING
    plain = router.find(r"health listening on ([\d.]+:\d+)")
    assert health(grpc.insecure_channel(plain)) == no
    assert health(grpc.insecure_channel(plain), "liveness") == yes
    successor = Authority(tmp_path / "successor")
    shown = {ca: ca.issue("client") for ca in (authority, successor)}

    def let_in(ca: Authority) -> tuple[bool, bool]:
        """Over gRPC, and over HTTP."""
        mine = shown[ca]
        context = ssl.create_default_context(cafile=str(authority.ca_file))
        context.load_cert_chain(*mine)
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        over_http = False
        try:
            opener.open(f"https://{web}/health", timeout=60)
        except urllib.error.HTTPError as answer:
            over_http = answer.code == 503
        except OSError:
            pass
        return health(grpc.secure_channel(address, authority.credentials(*mine))) == no, over_http

    assert let_in(authority) == (True, True)
    _replace(clients, b"no certificate")  # changes nothing
    assert let_in(authority) == (True, True)
    router.find("(new TLS files) are not taken up")
    assert let_in(successor) == (False, False)
    _replace(clients, successor.ca_file.read_bytes())
    deadline = time.monotonic() + 60
    while let_in(successor) != (True, True):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert let_in(authority) == (False, False)


def test_half_a_configuration_is_refused_by_name(authority: Authority) -> None:
    cert, _ = authority.issue("router")
    command = [sys.executable, "-m", "sapwood_router", "--port", "0", "--http-port", "0", "--tls-cert", str(cert)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "--tls-key" in done.stderr
