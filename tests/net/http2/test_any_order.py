"""Another implementation's client, several streams, windows and writes in any order: what arrives is what was sent."""

from __future__ import annotations

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, Event, SettingsAcknowledged, StreamEnded, StreamReset
from h2.settings import SettingCodes, Settings
from hypothesis import given, settings
from hypothesis import strategies as st

FIELDS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/test.Test/Echo"),
    (":authority", "x"),
    ("te", "trailers"),
]
FIELDS.append(("content-type", "application/grpc"))
_MOST_AT_ONCE = 60_000
"""Most bytes that are read at once. With more, the connection would continue in a later turn of an event loop: here is none."""


class Peers:
    """An ``h2`` client, a server that echoes, and the bytes on their way."""

    def __init__(self, wire, grpc_message, random, streams: list[list[bytes]]) -> None:
        self.wire = wire
        self.random = random
        self.client = H2Connection(H2Configuration(client_side=True))
        window = {SettingCodes.INITIAL_WINDOW_SIZE: random.choice((0, 1, 100, 65_535))}
        self.client.local_settings = Settings(client=True, initial_values=window)
        self.client.initiate_connection()
        self.settled = False
        self.bodies = {2 * i + 1: b"".join(map(grpc_message, item)) for i, item in enumerate(streams)}
        self.unsent = dict(self.bodies)
        self.unopened = sorted(self.bodies)
        self.received = dict.fromkeys(self.bodies, b"")
        self.ended: set[int] = set()
        self.outbound = b""
        self.paused = False
        self.taken = 0
        self.sizes = (1, 10, 1000, 1 << 20)

    @property
    def done(self) -> bool:
        return self.ended == self.bodies.keys()

    def open(self) -> None:
        if self.unopened:
            number = self.unopened.pop(0)
            self.client.send_headers(number, [*FIELDS, ("key", str(self.random.randint(0, 3)))])

    def send(self) -> None:
        open_ones = [number for number in self.unsent if number not in self.unopened]
        if not open_ones:
            return
        number = self.random.choice(open_ones)
        window = self.client.local_flow_control_window(number)
        size = min(window, self.random.choice((1, 7, 5000, 16_384)), len(self.unsent[number]))
        data, self.unsent[number] = self.unsent[number][:size], self.unsent[number][size:]
        ends = not self.unsent[number]
        if ends:
            del self.unsent[number]
        if data or ends:
            self.client.send_data(number, data, end_stream=ends)

    def to_server(self) -> None:
        self.outbound += self.client.data_to_send()
        size = min(self.random.choice(self.sizes), _MOST_AT_ONCE)
        data, self.outbound = self.outbound[:size], self.outbound[size:]
        if data:
            self.wire.send(data)

    def to_client(self) -> None:
        written = self.wire.transport.written
        for _ in range(self.random.choice(self.sizes)):
            if not written:
                break
            size = 9 + int.from_bytes(
                written[:3], "big"
            )  # a frame at a time: h2 takes up settings between two chunks only
            events = self.client.receive_data(bytes(written[:size]))
            del written[:size]
            self._take(events)

    def _take(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case DataReceived():
                    self.received[event.stream_id] += event.data
                    self.taken += event.flow_controlled_length
                case StreamEnded():
                    self.ended.add(event.stream_id)
                case SettingsAcknowledged():
                    self.settled = True
                case StreamReset():
                    raise AssertionError(event)

    def resize(self) -> None:
        if not self.settled:  # h2 takes the answer to one for the answer to all
            return
        self.settled = False
        window, frame = self.random.choice((0, 1, 300, 65_535, 1 << 20)), self.random.choice((16_384, 1 << 20))
        table = self.random.choice((0, 100, 4096))
        changed = {SettingCodes.INITIAL_WINDOW_SIZE: window, SettingCodes.MAX_FRAME_SIZE: frame}
        self.client.update_settings({**changed, SettingCodes.HEADER_TABLE_SIZE: table})

    def grant(self) -> None:
        streams = [number for number in self.bodies if number not in (*self.unopened, *self.ended)]
        if self.random.random() < 0.5 and streams:
            self.client.increment_flow_control_window(self.random.choice((1, 500, 70_000)), self.random.choice(streams))
        elif self.taken:
            self.client.increment_flow_control_window(self.taken)
            self.taken = 0

    def toggle(self) -> None:
        self.paused = not self.paused
        (self.wire.pause if self.paused else self.wire.resume)()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.lists(st.one_of(st.binary(max_size=50), st.integers(0, 40_000).map(bytes)), max_size=4),
        min_size=1,
        max_size=4,
    ),
    st.randoms(use_true_random=False),
)
def test_what_arrives_is_what_was_sent(make_wire, grpc_message, streams, random) -> None:
    wire = make_wire(echo=True, greet=False)
    peers = Peers(wire, grpc_message, random, streams)
    actions = [
        peers.open,
        peers.send,
        peers.send,
        peers.to_server,
        peers.to_client,
        peers.resize,
        peers.grant,
        peers.toggle,
    ]
    for _ in range(120):
        random.choice(actions)()
    if peers.paused:
        peers.toggle()
    peers.sizes = (1 << 20,)
    for _ in range(10_000):
        if peers.done:
            break
        peers.open()
        peers.send()
        peers.to_server()
        peers.to_client()
        if peers.settled and peers.client.local_settings.initial_window_size < 1 << 20:
            peers.client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 1 << 20})
        if peers.taken:
            peers.client.increment_flow_control_window(peers.taken)
            peers.taken = 0
    assert peers.received == peers.bodies
    assert wire.connection.idle
    assert not wire.transport.closed
