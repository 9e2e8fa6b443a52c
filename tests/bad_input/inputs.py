"""The type of a bad input, and constructors for common kinds. `all` sends them."""

import json
from typing import Any, Final, NamedTuple

CHAT: Final = b"/v1/chat/completions"
COMPLETIONS: Final = b"/v1/completions"
ADMIN_KEY: Final = "k" * 16
HELLO: Final[list[Any]] = [{"role": "user", "content": "Hello"}]
GOOD: Final = json.dumps({"model": "m", "messages": HELLO}).encode()
PEER: Final = "address-127.0.0.1"
"""The client to which a call without a key or user is charged."""


class Reply(NamedTuple):
    """A reply: a status of 400 or more with OpenAI's error object, or else a description of what was done."""

    status: int
    code: str | None
    param: str | None
    message: str


class BadInput(NamedTuple):
    """A name of what is wrong, the bytes to send, and the expected reply."""

    name: str
    data: bytes
    expected: Reply


def forwarded(client: str = PEER) -> Reply:
    """The expected reply to a call that the router forwards, as only the engine validates it."""
    return Reply(200, None, None, f"Forwarded to an engine for `{client}`.")


SERVED: Final = Reply(200, None, None, "Served.")


def request(method: bytes, path: bytes, *lines: bytes, body: bytes = b"", version: bytes = b"HTTP/1.1") -> bytes:
    if body and not any(line.startswith(b"content-type:") for line in lines):
        lines = (b"content-type: application/json", *lines)
    return b"%b %b %b\r\nhost: localhost\r\n%b\r\n%b" % (
        method,
        path,
        version,
        b"".join([b"%b\r\n" % x for x in lines]),
        body,
    )


def get(path: bytes, *lines: bytes) -> bytes:
    return request(b"GET", path, *lines)


def post(body: bytes, *lines: bytes, path: bytes = CHAT) -> bytes:
    return request(b"POST", path, b"content-length: %d" % len(body), *lines, body=body)


def chunks(body: bytes, *lines: bytes) -> bytes:
    return request(b"POST", CHAT, *(lines or (b"transfer-encoding: chunked",)), body=body)


def of_length(length: bytes) -> bytes:
    return request(b"POST", CHAT, b"content-length:" + length, body=b"{}")


def chat(**more: object) -> bytes:
    return post(json.dumps({"model": "m", "messages": HELLO, **more}).encode())


def text(**more: object) -> bytes:
    return post(json.dumps({"model": "m", "prompt": "Hello", **more}).encode(), path=COMPLETIONS)


def drain(*lines: bytes, worker: bytes = b"w") -> bytes:
    return request(b"POST", b"/workers/%b/drain" % worker, *lines)


def invalid_http(name: str, sent: bytes, reason: str) -> BadInput:
    message = f"The request is not valid HTTP, or is ambiguous: {reason}."
    return BadInput(name, sent, Reply(400, "invalid_http", None, message))


def invalid_json(name: str, body: bytes, reason: str) -> BadInput:
    return BadInput(name, post(body), Reply(400, "invalid_json", None, f"The body is not {reason}."))


def not_an_object(name: str, body: bytes) -> BadInput:
    return BadInput(name, post(body), Reply(400, "invalid_type", None, "The body must be a JSON object."))


def wrong_type(name: str, sent: bytes, param: str, expected: str) -> BadInput:
    return BadInput(name, sent, Reply(400, "invalid_type", param, f"`{param}` must be {expected}."))


def wrong_value(name: str, sent: bytes, param: str, reason: str) -> BadInput:
    return BadInput(name, sent, Reply(400, "invalid_value", param, f"`{param}` {reason}."))


def unknown_path(name: str, sent: bytes, path: str) -> BadInput:
    return BadInput(name, sent, Reply(404, "unknown_path", None, f"There is no path {path}."))


def wrong_method(name: str, sent: bytes, method: str, expected: str) -> BadInput:
    return BadInput(
        name, sent, Reply(405, "method_not_allowed", None, f"{method} is not allowed here; use {expected}.")
    )


def not_an_operator(name: str, *lines: bytes) -> BadInput:
    message = "This path needs the operator's key as a bearer token."
    return BadInput(name, drain(*lines), Reply(401, "invalid_admin_key", None, message))
