"""What an error came through is free as soon as it was told, without the collector."""

from __future__ import annotations

import gc
import weakref

import pytest

from sapwood_common.errors import InvalidArgumentError, SapwoodError, UnavailableError, forget_frames


class Request:
    """Of many megabytes."""


def fail(request: Request) -> None:
    raise ValueError(f"{type(request).__name__} was refused")


def tell(request: Request, again: str) -> None:
    try:
        try:
            fail(request)
        except ValueError as error:
            raise UnavailableError("it failed") from error
    except SapwoodError as error:
        kept = error  # as a future's awaiter does: the frame refers to the error, and the error to the frame
        if again == "itself":
            raise kept from error
        if again == "another":
            raise InvalidArgumentError("it failed") from error
        raise


def test_a_message_that_quotes_megabytes_is_cut() -> None:
    error = SapwoodError("there is no " + "a" * 8_000_000 + " here")
    assert len(error.message) < 4200
    assert error.message.startswith("there is no a")
    assert error.message.endswith("a here")
    assert str(error) == error.message


@pytest.mark.parametrize("again", ["itself", "another", "as it is"])
def test_a_request_that_failed_is_free_once_its_error_was_told(again) -> None:
    gc.disable()
    try:
        request = Request()
        alive = weakref.ref(request)
        with pytest.raises(SapwoodError) as caught:
            tell(request, again)
        error = caught.value
        forget_frames(error)
        del caught, request
        assert alive() is None
        assert error.message == "it failed"
    finally:
        gc.enable()
