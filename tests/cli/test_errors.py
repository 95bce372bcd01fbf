"""The client's errors compared with those of the services: whatever a service raises, the client's caller can tell."""

from __future__ import annotations

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sapwood import errors as client_errors
from sapwood_common import errors, status


class _FailedCall:
    """The parts of a failed grpc call that the client reads."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing: tuple[tuple[str, str | bytes], ...]) -> None:
        self._code, self._details, self._trailing = code, details, trailing

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return self._trailing


@pytest.mark.parametrize("row", status.TABLE, ids=lambda row: row.grpc.name)
@given(
    field=st.none() | st.text(min_size=1, max_size=300),
    retry_after=st.none() | st.integers(0, 10**7).map(lambda milliseconds: milliseconds / 1000),
)
def test_every_status_arrives_with_message_field_and_delay(
    row: status.StatusRow, field: str | None, retry_after: float | None
) -> None:
    raised = row.error("what is wrong", field=field, retry_after=retry_after)
    call = _FailedCall(row.grpc, raised.message, status.to_trailing_metadata(raised))
    seen = client_errors.from_rpc_error(call)
    assert (seen.status, seen.message, seen.field) == (row.grpc, "what is wrong", field)
    assert seen.retry_after == pytest.approx(retry_after)


def test_each_class_of_the_services_has_a_class_of_its_own_here() -> None:
    classes = {type(client_errors.from_rpc_error(_FailedCall(row.grpc, "", ()))) for row in status.TABLE}
    assert len(classes) == len(status.TABLE)
    assert client_errors.SapwoodError not in classes


@given(st.binary(max_size=200))
def test_broken_details_do_not_hide_the_error(raw: bytes) -> None:
    call = _FailedCall(grpc.StatusCode.NOT_FOUND, "no such model", (("grpc-status-details-bin", raw),))
    seen = client_errors.from_rpc_error(call)
    assert isinstance(seen, client_errors.NotFoundError)
    assert seen.message == "no such model"


def test_a_status_no_service_sends_is_a_server_error() -> None:
    seen = client_errors.from_rpc_error(_FailedCall(grpc.StatusCode.DATA_LOSS, "", ()))
    assert type(seen) is client_errors.ServerError
    assert errors.InternalError is status.error_of_code(seen.status)


def test_the_text_of_an_error_names_status_and_field() -> None:
    error = client_errors.InvalidArgumentError(grpc.StatusCode.INVALID_ARGUMENT, "must be at least 0", field="top_k")
    assert str(error) == "INVALID_ARGUMENT (top_k): must be at least 0"
