import orjson

from router.api.body.error_bodies import error_body, error_event, refusal_event
from router.errors import Refused, UnknownModel, WorkerError


def test_error_body_has_openais_shape() -> None:
    """Client libraries find message, type, param and code where OpenAI puts them."""
    assert orjson.loads(error_body(UnknownModel("nope"))) == {
        "error": {
            "message": "The model `nope` does not exist.",
            "type": "not_found_error",
            "param": "model",
            "code": "model_not_found",
        }
    }


def test_error_event_ends_the_stream() -> None:
    """In a stream the error is an event of its own, and [DONE] follows it."""
    error = Refused("The queue is full.")
    assert error_event(error) == b"data: " + error_body(error) + b"\n\ndata: [DONE]\n\n"


def test_a_refusal_of_any_form_ends_the_stream() -> None:
    """An engine's error is passed on if it can be serialised, else only its status."""
    deep = b'{"error":{"message":' + b"[" * 300 + b"]" * 300 + b"}}"
    for body in (deep, b"no JSON", b"[]", b'{"error":7}', b""):
        assert refusal_event(500, body) == error_event(WorkerError("The worker answered with status 500.", code="500"))
    assert refusal_event(500, b'{"error":{"message":"x","more":1}}').startswith(
        b'data: {"error":{"message":"x","more":1}}'
    )
