"""The small part of HTTP that a worker needs on top of ASGI."""

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from workers.api.call import ApiError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

JSON: Final = b"application/json"
PLAIN: Final = b"text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request with its whole body; header names are in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> dict[str, object]:
        """Return the body as an object. Raises ApiError 400 if it is not one."""
        content_type = self.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise ApiError(400, "Unsupported Media Type: Only 'application/json' is allowed", "Bad Request")
        try:
            body = orjson.loads(self.body)
        except orjson.JSONDecodeError as error:
            raise ApiError(400, f"JSON decode error: {error}", "Bad Request", "body") from error
        if not isinstance(body, dict):
            raise ApiError(400, "Input should be a valid dictionary", "Bad Request", "body")
        return body


@dataclass(frozen=True, slots=True)
class Response:
    """A whole answer."""

    body: bytes = b""
    status: int = 200
    content_type: bytes = JSON


Handler = Callable[[HttpRequest], Response]
Routes = Mapping[tuple[str, str], Handler]


def json_response(content: object, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status)


async def read_request(scope: Scope, receive: Receive) -> HttpRequest:
    """Wait for the whole body. Raises ConnectionResetError if the client disconnects before its end."""
    parts, more = [], True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionResetError
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    return HttpRequest(scope["method"], scope["path"], headers, b"".join(parts))


async def send_response(send: Send, response: Response) -> None:
    headers = [(b"content-length", b"%d" % len(response.body))]
    if response.body:
        headers.append((b"content-type", response.content_type))
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body})
