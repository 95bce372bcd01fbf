"""What a follower tells the leader of a step."""

from __future__ import annotations

import zlib
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from sapwood_worker.records.page_copies import NOTHING, CopyReport
from sapwood_worker.records.step import ModelOutput


class RankReport(msgspec.Struct, frozen=True, array_like=True):
    """A step's end on a rank.

    Attributes:
        step: Its number.
        digest: A hash of the sampled tokens; if it is not equal on all ranks, one of them computes something else.
        copied: The copies between tiers that have ended there.
        error: What the step failed with; empty: it has not.
        output: What the rank has sampled for requests of its own; None: all ranks sample the same.
        entered: Exchanges between ranks that it had entered or launched when it reported a failure.
        experts: How many tokens each expert of each of its stage's layers has got; it then reports no step but this.
    """

    step: int
    digest: int = 0
    copied: CopyReport = NOTHING
    error: str = ""
    output: ModelOutput | None = None
    entered: int = 0
    experts: list[list[int]] | None = None

    @staticmethod
    def of(output: ModelOutput, *, whole: bool = False) -> RankReport:
        """The report of a step's output, with it or with a digest of it. O(parts)."""
        if whole:
            return RankReport(output.step, copied=output.copied, output=output)
        return RankReport(output.step, zlib.crc32(_encoder.encode(output.token_ids)), output.copied)

    @staticmethod
    def of_failure(step: int, error: Exception, entered: int) -> RankReport:
        """The report of a step that has failed, after so many exchanges in all."""
        return RankReport(step, error=str(error) or type(error).__name__, entered=entered)

    def to_bytes(self) -> bytes:
        """The report in msgpack."""
        return _encoder.encode(self)

    @staticmethod
    def from_bytes(data: bytes) -> RankReport:
        """What :meth:`to_bytes` has written."""
        return _decoder.decode(data)


def _pack(value: Any) -> bytes:
    assert isinstance(value, np.ndarray)
    return value.astype(np.float32, copy=False).tobytes()


def _unpack(_: type, data: bytes) -> npt.NDArray[np.float32]:
    return np.frombuffer(data, np.float32)


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack)
_decoder = msgspec.msgpack.Decoder(RankReport, dec_hook=_unpack)
