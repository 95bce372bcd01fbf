import asyncio

import pytest

from sapwood_common.errors import ConfigError
from sapwood_net.sockets.port import Port


class Greeter(asyncio.Protocol):
    def connection_made(self, transport) -> None:
        transport.write(b"hello")
        transport.close()


async def test_a_port_serves_until_closed() -> None:
    port = Port("127.0.0.1", 0)
    number = port.open(Greeter)
    reader, writer = await asyncio.open_connection("127.0.0.1", number)
    assert await reader.read() == b"hello"
    writer.close()
    port.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", number)


async def test_a_port_in_use_is_a_configuration_error_unless_it_is_shared() -> None:
    first = Port("127.0.0.1", 0, reuse=True)
    number = first.open(Greeter)
    with pytest.raises(ConfigError, match=str(number)):
        Port("127.0.0.1", number).open(Greeter)
    second = Port("127.0.0.1", number, reuse=True)
    assert second.open(Greeter) == number
    first.close()
    second.close()
