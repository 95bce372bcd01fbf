"""What a follower tells the leader of a step."""

from __future__ import annotations

import zlib

import msgspec

from sapwood_worker.records.page_copies import NOTHING, CopyReport
from sapwood_worker.records.step import ModelOutput


class RankReport(msgspec.Struct, frozen=True, array_like=True):
    """A step's end on a rank.

    Attributes:
        step: Its number.
        digest: A hash of the sampled tokens; if it is not equal on all ranks, one of them computes something else.
        copied: The copies between tiers that have ended there.
        error: What the step failed with; empty: it has not.
    """

    step: int
    digest: int = 0
    copied: CopyReport = NOTHING
    error: str = ""

    @staticmethod
    def of(output: ModelOutput) -> RankReport:
        """The report of a step's output. O(parts)."""
        return RankReport(output.step, zlib.crc32(_encoder.encode(output.token_ids)), output.copied)

    @staticmethod
    def of_failure(step: int, error: Exception) -> RankReport:
        """The report of a step that has failed."""
        return RankReport(step, error=str(error) or type(error).__name__)

    def to_bytes(self) -> bytes:
        """The report in msgpack."""
        return _encoder.encode(self)

    @staticmethod
    def from_bytes(data: bytes) -> RankReport:
        """What :meth:`to_bytes` has written."""
        return _decoder.decode(data)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RankReport)
