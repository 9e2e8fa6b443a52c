"""What is wrong with a request before it is a call, and how that is told: in HTTP's own bytes, by no application."""

from collections.abc import Sequence

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from router.api.error_json import error_body
from router.connections import FrontLimits
from router.errors import BadRequest, HeadTooLarge, RouterError, UrlTooLong


def wrong_head(
    parser: httptools.HttpRequestParser,
    url: bytes,
    headers: Sequence[tuple[bytes, bytes]],
    limits: FrontLimits,
) -> RouterError | None:
    """What is wrong with a head that was parsed; None if its call may be served."""
    codings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
    if codings and (codings != [b"chunked"] or parser.get_http_version() == "1.0"):
        # Others could see this body end elsewhere: its coding is not read, or not known in HTTP/1.0.
        return BadRequest("A body may come in chunks and in no other transfer encoding.", code="invalid_http")
    if len(url) > limits.url_bytes:
        return UrlTooLong(limits.url_bytes)
    size = len(url) + sum([len(name) + len(value) + 4 for name, value in headers])
    return HeadTooLarge(limits.head_bytes) if size > limits.head_bytes else None


def not_http(error: httptools.HttpParserError) -> BadRequest:
    """For what cannot be parsed."""
    if isinstance(error, httptools.HttpParserCallbackError):
        complaint = "Invalid URL"  # nothing else that is done there can fail
    else:
        complaint = "HTTP/2 is not spoken here" if "PRI" in str(error) else str(error)
    return BadRequest(f"This is no HTTP request, or an ambiguous one: {complaint}.", code="invalid_http")


def refusal(error: RouterError) -> bytes:
    """The whole answer that tells it, after which the connection is to end."""
    body = error_body(error)
    lines = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        *error.headers(),
        (b"connection", b"close"),
    ]
    head = b"".join(b"%b: %b\r\n" % line for line in lines)
    return b"%b%b\r\n%b" % (STATUS_LINE[error.status], head, body)
