"""Other users' rights to secrets, and to files of keys, are warned about when a service starts."""

import contextlib
import hashlib
import logging

import pytest

from sapwood_common.secret_file import others_may_read
from sapwood_common.serving.server import ServiceServer
from sapwood_common.tenants.api_keys import ApiKeys
from sapwood_net.sockets.tls import ServerTls


@pytest.mark.parametrize(
    ("mode", "warned"), [(0o600, False), (0o400, False), (0o640, True), (0o604, True), (0o602, True)]
)
def test_rights_of_others_to_a_file_of_ours_are_seen(tmp_path, mode, warned) -> None:
    path = tmp_path / "secret"
    path.write_text("secret")
    path.chmod(mode)
    assert others_may_read(path) is warned


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o644, True)])
def test_a_server_warns_of_a_tls_key_that_others_may_read(tmp_path, caplog, mode, warned) -> None:
    key = tmp_path / "tls.key"
    key.write_text("")
    key.chmod(mode)
    with caplog.at_level(logging.WARNING), contextlib.suppress(OSError):  # there is no certificate
        ServiceServer("127.0.0.1", 0, [], tls=ServerTls(tmp_path / "tls.crt", key))
    assert [f"--tls-key: other users may read or change {key}" in line for line in caplog.messages] == [True] * warned


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o644, False), (0o646, True)])
def test_a_file_of_api_keys_that_others_may_change_is_warned_about(tmp_path, caplog, mode, warned) -> None:
    path = tmp_path / "keys"
    path.write_text(f"alice {hashlib.sha256(b'a').hexdigest()}\n")
    path.chmod(mode)
    with caplog.at_level(logging.WARNING):
        ApiKeys(path)
    assert [f"--api-keys: other users may change {path}" in line for line in caplog.messages] == [True] * warned
