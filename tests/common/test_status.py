from urllib.parse import quote

import grpc
import pytest

from sapwood_common import errors, status


class FailedCall(grpc.aio.AioRpcError):
    pass


def as_rpc_error(error: errors.SapwoodError) -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata(*status.to_trailing_metadata(error))
    return FailedCall(status.row_of(error).grpc, grpc.aio.Metadata(), trailing, error.message)


@pytest.mark.parametrize("row", status.TABLE, ids=lambda row: row.error.__name__)
def test_every_error_survives_the_way_over_grpc(row: status.StatusRow) -> None:
    sent = row.error("what happened", field="sampling.top_p", retry_after=1.5)
    received = status.from_rpc_error(as_rpc_error(sent))
    assert type(received) is row.error
    assert (received.message, received.field, received.retry_after) == ("what happened", "sampling.top_p", 1.5)


def test_each_error_class_and_each_code_stands_in_the_table_once() -> None:
    assert len({row.error for row in status.TABLE}) == len(status.TABLE)
    assert len({row.grpc for row in status.TABLE}) == len(status.TABLE)
    assert {row.error for row in status.TABLE} == set(errors.SapwoodError.__subclasses__())


def test_a_subclass_takes_the_row_of_its_parent() -> None:
    class ContextFullError(errors.InvalidArgumentError):
        pass

    assert status.row_of(ContextFullError("x")).http == 400


def test_an_error_without_field_or_delay_sends_no_details() -> None:
    assert status.to_trailing_metadata(errors.InternalError("x")) == ()


def test_broken_details_of_a_peer_do_not_hide_its_error() -> None:
    trailing = grpc.aio.Metadata(("grpc-status-details-bin", b"\xff\xff\xff"))
    error = FailedCall(grpc.StatusCode.NOT_FOUND, grpc.aio.Metadata(), trailing, "no such model")
    received = status.from_rpc_error(error)
    assert isinstance(received, errors.NotFoundError)
    assert received.field is None


def test_a_call_that_broke_as_its_server_stopped_was_cancelled_by_nobody() -> None:
    error = FailedCall(grpc.StatusCode.CANCELLED, grpc.aio.Metadata(), grpc.aio.Metadata(), "")
    assert isinstance(status.from_rpc_error(error), errors.UnavailableError)


def test_a_status_nobody_here_sends_becomes_an_internal_error() -> None:
    error = FailedCall(grpc.StatusCode.DATA_LOSS, grpc.aio.Metadata(), grpc.aio.Metadata(), "?")
    assert isinstance(status.from_rpc_error(error), errors.InternalError)


def test_numeric_codes_of_multiplexed_streams_become_the_same_errors() -> None:
    sent = errors.InvalidArgumentError("bad", field="token_ids")
    received = status.from_parts(status.code_number(sent), sent.message, "token_ids")
    assert type(received) is errors.InvalidArgumentError
    assert received.field == "token_ids"


@pytest.mark.parametrize("quoted", ["a" * 100_000, "\0" * 100_000, "\N{SNAKE}" * 100_000, "a" * 1000])
def test_a_message_that_quotes_much_fits_the_metadata_that_clients_take(quoted: str) -> None:
    _, message, trailing = status.rpc_status(errors.InvalidArgumentError(f"no {quoted}!", field=quoted))
    assert message.startswith("no ") and message.endswith("!")
    details = sum(len(value) * 4 / 3 for _, value in trailing)
    assert len(quote(message)) + details < 8192
