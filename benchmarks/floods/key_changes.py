"""A TLS client that changes keys again and again, which Python's ``ssl`` cannot: its OpenSSL is asked directly."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import cache

_KEYS_OF_BOTH = 1
"""The server is asked to change its keys, too."""
_BATCH = 1000


@cache
def _library() -> ctypes.CDLL:
    import _ssl

    library = ctypes.CDLL(_ssl.__file__)
    for name in ("TLS_client_method", "SSL_CTX_new", "SSL_new", "BIO_s_mem", "BIO_new"):
        getattr(library, name).restype = ctypes.c_void_p
    return library


class KeyChanger:
    """One connection's end, on memory. What it returns is to be sent, what is received to be fed. Close it in the end."""

    def __init__(self) -> None:
        library, pointer = _library(), ctypes.c_void_p
        self._context = pointer(library.SSL_CTX_new(pointer(library.TLS_client_method())))
        library.SSL_CTX_set_alpn_protos(self._context, b"\x02h2", 3)
        self._tls = pointer(library.SSL_new(self._context))
        self._incoming, self._outgoing = (pointer(library.BIO_new(pointer(library.BIO_s_mem()))) for _ in range(2))
        library.SSL_set_bio(self._tls, self._incoming, self._outgoing)
        library.SSL_set_connect_state(self._tls)
        self.shaken = False

    def shake(self, received: bytes = b"") -> bytes:
        """Continues with the handshake; then ``shaken`` is true."""
        library = _library()
        library.BIO_write(self._incoming, received, len(received))
        self.shaken = library.SSL_do_handshake(self._tls) == 1
        return self._take()

    def changes(self) -> Iterator[bytes]:
        """Records, each with a change of keys, without an end."""
        library = _library()
        while True:
            for _ in range(_BATCH):
                library.SSL_key_update(self._tls, _KEYS_OF_BOTH)
                library.SSL_do_handshake(self._tls)
            yield self._take()

    def close(self) -> None:
        """Frees its memory."""
        _library().SSL_free(self._tls)
        _library().SSL_CTX_free(self._context)

    def _take(self) -> bytes:
        parts, buffer = [], ctypes.create_string_buffer(65536)
        while (count := _library().BIO_read(self._outgoing, buffer, len(buffer))) > 0:
            parts.append(buffer.raw[:count])
        return b"".join(parts)
