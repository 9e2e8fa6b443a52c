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
    size: int,
    limits: FrontLimits,
) -> RouterError | None:
    """What is wrong with a head of this size that was parsed; None if its call may be served."""
    codings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
    if codings and (codings != [b"chunked"] or parser.get_http_version() == "1.0"):
        # Others could see this body end elsewhere: its coding is not read, or not known in HTTP/1.0.
        return BadRequest("A body may come in chunks and in no other transfer encoding.", code="invalid_http")
    if len(url) > limits.url_bytes:
        return UrlTooLong(limits.url_bytes)
    if size > limits.head_bytes:
        return HeadTooLarge(limits.head_bytes)
    return _wrong_version_or_host(parser.get_http_version(), headers)


def _wrong_version_or_host(version: str, headers: Sequence[tuple[bytes, bytes]]) -> RouterError | None:
    """HTTP/0.9 has no headers to name a client by; with no host or two, a proxy may have meant another server."""
    if version not in ("1.0", "1.1"):
        return BadRequest("HTTP/1.0 and HTTP/1.1 are spoken here.", code="invalid_http")
    hosts = sum([name == b"host" for name, _ in headers])
    if hosts > 1 or (not hosts and version == "1.1"):
        return BadRequest("A request must have one Host header.", code="invalid_http")
    return None


def head_size(url: bytes, headers: Sequence[tuple[bytes, bytes]]) -> int:
    """About how many bytes a head took."""
    return len(url) + sum([len(name) + len(value) + 4 for name, value in headers])


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
