import orjson

from router.api.error_json import error_body, error_event
from router.errors import Refused, UnknownModel


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
