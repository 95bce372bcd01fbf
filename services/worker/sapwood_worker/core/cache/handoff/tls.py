"""TLS between workers that pass pages on: each shows a certificate, and wants one of the same CAs from the other."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NamedTuple


class PageTls(NamedTuple):
    """Files in PEM, read anew for each connection, so that new ones are taken up.

    Attributes:
        cert: The worker's certificate.
        key: Its private key.
        ca: The CAs of the other's. Whoever has a certificate of them is a worker: names and addresses are not compared, and what
            a connection may read is told by a ticket.
    """

    cert: Path
    key: Path
    ca: Path

    def server(self) -> ssl.SSLContext:
        """The context of the side that is asked. Raises OSError (ssl.SSLError among them): the files are missing or broken."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0  # a session that is resumed is not verified again
        return self._filled(context)

    def client(self) -> ssl.SSLContext:
        """The context of the side that asks. Raises what :meth:`server` does."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        return self._filled(context)

    def _filled(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(self.ca)
        context.load_cert_chain(self.cert, self.key)
        return context
