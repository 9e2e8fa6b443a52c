"""What is wrong with a request before it is a call, and how that is told: in HTTP's own bytes, by no application."""

import re
from collections.abc import Sequence
from typing import Final

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from router.api.body.error_bodies import error_body
from router.errors import BadRequest, HeadTooLarge, HostNotAllowed, RouterError, UrlTooLong
from router.front.http.connection_limits import FrontLimits

SUPPORTED_VERSIONS: Final = "HTTP/1.0 and HTTP/1.1 are spoken here."


def head_error(
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
    return _wrong_version(parser.get_http_version()) or _wrong_host(parser.get_http_version(), headers, limits.hosts)


def named_protocol(received: bytes, method: bytes, url: bytes, start: int) -> tuple[bytes, int]:
    """The protocol that a request line names, and where its URL ends; httptools takes RTSP and ICE for HTTP.

    `received`: all bytes of a head that was parsed, and maybe some before it; from `start` on, the first line of this
    method and URL counts.
    """
    line = b"%b %b" % (method, url)
    end = received.find(line, start) + len(line)
    if end >= len(line) and received.startswith(b" HTTP/", end):
        return b"HTTP", end
    found = re.compile(re.escape(method) + b" +" + re.escape(url) + rb" +(\w+)/").search(received, start)
    return (b"HTTP", start) if found is None else (found[1], found.end())


def _wrong_version(version: str) -> RouterError | None:
    """HTTP/0.9 has no headers to name a client by."""
    if version not in ("1.0", "1.1"):
        return BadRequest(SUPPORTED_VERSIONS, code="invalid_http")
    return None


def _wrong_host(
    version: str, headers: Sequence[tuple[bytes, bytes]], allowed: frozenset[bytes] | None
) -> RouterError | None:
    """With no host or two, a proxy may have meant another server; HTTP/1.0 may do without."""
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (not hosts and version == "1.1"):
        return BadRequest("A request must have one Host header.", code="invalid_http")
    if allowed is not None and hosts and _without_port(hosts[0]) not in allowed:
        return HostNotAllowed(hosts[0].decode("latin-1"))
    return None


def _without_port(host: bytes) -> bytes:
    name = host.strip().lower()
    return name.partition(b"]")[0] + b"]" if name.startswith(b"[") else name.partition(b":")[0]


def head_size(url: bytes, headers: Sequence[tuple[bytes, bytes]]) -> int:
    """About how many bytes a head took."""
    return len(url) + sum([len(name) + len(value) + 4 for name, value in headers])


def parse_error(error: httptools.HttpParserError) -> BadRequest:
    """For what cannot be parsed."""
    if isinstance(error, httptools.HttpParserCallbackError):
        complaint = "Invalid URL"  # nothing else that is done there can fail
    else:
        complaint = "HTTP/2 is not spoken here" if "PRI" in str(error) else str(error)
    return BadRequest(f"This is no HTTP request, or an ambiguous one: {complaint}.", code="invalid_http")


def error_response(error: RouterError) -> bytes:
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
