import pytest

from router.errors import (
    BadRequest,
    BodyTooLarge,
    ClientError,
    ConfigError,
    MethodNotAllowed,
    NoWorker,
    Refused,
    RouterError,
    UnknownModel,
    UnknownPath,
    WorkerBroke,
    WorkerUnreachable,
)


@pytest.mark.parametrize(
    ("error", "status", "type_"),
    [
        (BadRequest("x"), 400, "invalid_request_error"),
        (BodyTooLarge(9), 413, "invalid_request_error"),
        (UnknownPath("/x"), 404, "not_found_error"),
        (MethodNotAllowed("GET", "POST"), 405, "invalid_request_error"),
        (UnknownModel("x"), 404, "not_found_error"),
        (Refused("x"), 429, "rate_limit_error"),
        (NoWorker("x"), 503, "server_error"),
        (WorkerUnreachable("x", accepted=False), 502, "server_error"),
        (WorkerBroke("x"), 502, "server_error"),
    ],
)
def test_the_class_decides_status_and_type(error: RouterError, status: int, type_: str) -> None:
    """The class of an error alone decides its status and type."""
    assert (error.status, error.type) == (status, type_)
    assert isinstance(error, ClientError) == (400 <= status < 500 and status != 429)


@pytest.mark.parametrize(("seconds", "header"), [(0.0, b"1"), (0.2, b"1"), (1.0, b"1"), (1.01, b"2"), (59.5, b"60")])
def test_retry_after_is_whole_seconds_rounded_up(seconds: float, header: bytes) -> None:
    """Retry-After is at least one second, and never earlier than intended."""
    error = Refused("The queue is full.", retry_after=seconds, reason="rejected-saturated")
    assert error.headers() == [(b"retry-after", header), (b"x-d2lpm-dropped-reason", b"rejected-saturated")]


def test_an_error_without_details_has_no_headers() -> None:
    """Headers are sent only for known values."""
    assert BadRequest("x").headers() == []


def test_method_not_allowed_names_the_allowed_method() -> None:
    """A 405 carries the Allow header that HTTP demands."""
    assert MethodNotAllowed("GET", "POST").headers() == [(b"allow", b"POST")]


def test_unknown_model_is_shaped_as_openai_shapes_it() -> None:
    """Client libraries recognise an unknown model by its code and parameter."""
    error = UnknownModel("nope")
    assert (error.param, error.code) == ("model", "model_not_found")
    assert "`nope`" in error.message


def test_echoed_names_are_bounded() -> None:
    """A long path or model name does not come back whole in the error."""
    assert len(UnknownModel("m" * 10_000).message) < 300
    assert len(UnknownPath("/" * 10_000).message) < 300


def test_config_error_is_not_an_http_error() -> None:
    """A configuration error cannot be mistaken for an answer to a client."""
    assert not issubclass(ConfigError, RouterError)
