"""Servers under attack, each a process of its own: our router in front of mock workers, and grpcio's server."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from floods.others import make_kinds
from router_load.engines import Ports, Process, Times, Workers, wait_for

from sapwood_common.tenants.api_keys import hash_key, make_key

OURS, GRPCIO = "sapwood", "grpcio"
_BENCHMARKS = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Target:
    """A server that is ready. ``http_port`` is 0 of one that has none. ``attackers_key`` is of another tenant than ``key``."""

    name: str
    process: Process
    grpc_port: int
    http_port: int
    key: str
    attackers_key: str
    tls: bool


@contextlib.contextmanager
def router(folder: Path, tls: bool, *flags: str) -> Iterator[Target]:
    """Ours, with keys."""
    key, attackers_key = make_key(), make_key()
    keys = folder / "api-keys"
    keys.write_text(f"other {hash_key(key)}\nattacker {hash_key(attackers_key)}\n")
    with Workers(Times(base_ms=1), folder, 2) as workers:
        grpc_port, http_port = workers.ports.take(), workers.ports.take()
        command = [
            *(sys.executable, "-m", "sapwood_router", "--host", "127.0.0.1", "--log-level", "warning"),
            *("--http-port", str(http_port), "--port", str(grpc_port), "--api-keys", str(keys)),
            *("--tokenizer", f"127.0.0.1:{workers.tokenizer_port}"),
            *("--workers", *(f"127.0.0.1:{port}" for port in workers.grpc_ports)),
            *(_tls_flags(folder, "--tls-cert", "--tls-key") if tls else ()),
            *flags,
        ]
        process = Process(command, {}, folder / "router.log")
        target = Target(OURS, process, grpc_port, http_port, key, attackers_key, tls)
        try:
            _await_ready(target)
            yield target
        finally:
            process.stop()


@contextlib.contextmanager
def grpcio_server(folder: Path, tls: bool) -> Iterator[Target]:
    """grpcio's."""
    ports = Ports()
    port = ports.take()
    command = [sys.executable, "-m", "floods.grpcio_server", "--port", str(port)]
    command += _tls_flags(folder, "--cert", "--key") if tls else ()
    process = Process(command, {"PYTHONPATH": str(_BENCHMARKS)}, folder / "grpcio.log")
    target = Target(GRPCIO, process, port, 0, "", "", tls)
    try:
        _await_ready(target)
        yield target
    finally:
        process.stop()
        ports.close()


def _await_ready(target: Target) -> None:
    async def ask_all() -> None:
        for ask in make_kinds(target.grpc_port, target.http_port, target.key, target.tls).values():
            await asyncio.wait_for(ask(), 5)

    def answers() -> bool:
        assert target.process.handle.poll() is None, f"{target.name} ended; see {target.process.log}"
        try:
            asyncio.run(ask_all())
        except Exception:
            return False
        return True

    wait_for(answers, target.name)


def _tls_flags(folder: Path, cert_flag: str, key_flag: str) -> list[str]:
    """A certificate that nobody has to trust."""
    cert_file, key_file = folder / "cert.pem", folder / "key.pem"
    if not cert_file.exists():
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
        now = datetime.datetime.now(datetime.UTC)
        alternative = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        cert = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(alternative, critical=False)
            .sign(key, hashes.SHA256())
        )
        key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        cert_file.write_bytes(cert.public_bytes(serialization.Encoding.PEM))
    return [cert_flag, str(cert_file), key_flag, str(key_file)]
