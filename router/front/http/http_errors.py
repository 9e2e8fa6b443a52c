"""Errors in a request that are answered before the application is called, as raw HTTP bytes."""

import re
from collections.abc import Sequence
from typing import Final

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from router.api.body.error_bodies import error_body
from router.errors import BadRequest, HeadTooLarge, HostNotAllowed, RouterError, UrlTooLong
from router.front.http.connection_limits import FrontLimits

SUPPORTED_VERSIONS: Final = "Only HTTP/1.0 and HTTP/1.1 are supported."


def check_head(
    parser: httptools.HttpRequestParser, url: bytes, headers: Sequence[tuple[bytes, bytes]], limits: FrontLimits
) -> tuple[int, RouterError | None]:
    """Return the estimated size of a parsed head in bytes, and its error; None if the call can be served."""
    version, encodings, hosts, size = parser.get_http_version(), [], [], len(url)
    for name, value in headers:
        size += len(name) + len(value) + 4
        if name == b"host":
            hosts.append(value)
        elif name == b"transfer-encoding":
            encodings.append(value.lower())
    return size, _head_error(version, url, encodings, hosts, size, limits)


def _head_error(
    version: str, url: bytes, encodings: list[bytes], hosts: Sequence[bytes], size: int, limits: FrontLimits
) -> RouterError | None:
    if encodings and (encodings != [b"chunked"] or version == "1.0"):
        # Request smuggling: another server could see the end of this body elsewhere, because the parser does not decode
        # this encoding, or because HTTP/1.0 has none.
        return BadRequest("The only supported transfer encoding is chunked, and only in HTTP/1.1.", code="invalid_http")
    if len(url) > limits.url_bytes:
        return UrlTooLong(limits.url_bytes)
    if size > limits.head_bytes:
        return HeadTooLarge(limits.head_bytes)
    if version not in ("1.0", "1.1"):  # HTTP/0.9 has no headers that could identify a client
        return BadRequest(SUPPORTED_VERSIONS, code="invalid_http")
    return _wrong_host(version, hosts, limits.hosts)


def named_protocol(received: bytes, method: bytes, url: bytes, start: int) -> tuple[bytes, int]:
    """Return the protocol in a request line and the position after its URL. httptools accepts RTSP and ICE as HTTP.

    `received`: all bytes of a parsed head, possibly with some before it. The first line with this method and URL at or
    after `start` counts.
    """
    line = b"%b %b" % (method, url)
    end = received.find(line, start) + len(line)
    if end >= len(line) and received.startswith(b" HTTP/", end):
        return b"HTTP", end
    match = re.compile(re.escape(method) + b" +" + re.escape(url) + rb" +(\w+)/").search(received, start)
    return (b"HTTP", start) if match is None else (match[1], match.end())


def _wrong_host(version: str, hosts: Sequence[bytes], allowed: frozenset[bytes] | None) -> RouterError | None:
    """Return an error for a missing, repeated or forbidden Host header. HTTP/1.0 does not require one.

    Without exactly one host, a proxy may have routed the request by another name.
    """
    if len(hosts) > 1 or (not hosts and version == "1.1"):
        return BadRequest("A request must have one Host header.", code="invalid_http")
    if allowed is not None and hosts and without_port(hosts[0]) not in allowed:
        return HostNotAllowed(hosts[0].decode("latin-1"))
    return None


def without_port(host: bytes) -> bytes:
    """Return the name in a Host header, in lower case."""
    name = host.strip().lower()
    return name.partition(b"]")[0] + b"]" if name.startswith(b"[") else name.partition(b":")[0]


def parse_error(error: httptools.HttpParserError) -> BadRequest:
    """Return the error for input that cannot be parsed."""
    if isinstance(error, httptools.HttpParserCallbackError):
        reason = "Invalid URL"  # parsing the URL is all that can fail in the callbacks
    else:
        reason = "HTTP/2 is not supported" if "PRI" in str(error) else str(error)
    return BadRequest(f"The request is not valid HTTP, or is ambiguous: {reason}.", code="invalid_http")


def error_response(error: RouterError) -> bytes:
    """Return a complete HTTP answer for an error. The connection is to be closed after it."""
    body = error_body(error)
    lines = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        *error.headers(),
        (b"connection", b"close"),
    ]
    head = b"".join(b"%b: %b\r\n" % line for line in lines)
    return b"%b%b\r\n%b" % (STATUS_LINE[error.status], head, body)
