"""Invalid answers, as broken engines and the proxies before them send them. Pure."""

from random import Random
from typing import Final

NO_HTTP: Final = b"\x00\x93\xffgarbage\r\n\r\n\x00"
PAGE: Final = b"<html>\n\n<body>502 Bad Gateway</body>\n\n</html>"
STREAM_HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
ERROR: Final = b'{"error":{"message":"EngineCore died.","type":"InternalServerError","param":null,"code":500}}'
AMID: Final = (
    b"4\r\n\x00\x93\n\n\r\n",
    b"d\r\ndata: {]\x00}\n\n\r\n",
    b"1f\r\nHTTP/1.1 500 Internal failure\n\n\r\n",
    b"5\r\nwhat?",
    b"zz\r\n",
)
"""Invalid data amid a chunked stream: no events, or no chunks."""


def whole(status: int, body: bytes, kind: str = "application/json") -> bytes:
    """Return a complete HTTP answer."""
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def chunked(*blocks: bytes) -> bytes:
    """Return a complete chunked stream of these blocks."""
    return STREAM_HEAD + b"".join([b"%x\r\n%b\r\n" % (len(block), block) for block in blocks]) + b"0\r\n\r\n"


def invalid_answer(random: Random) -> bytes:
    """Return bytes to send in place of an answer."""
    return random.choice(
        (
            NO_HTTP,
            whole(200, PAGE, "text/html"),
            whole(200, b'{"choices": 7}'),
            whole(200, b'{"choi'),
            whole(200, b"[]"),
            whole(200, b""),
            chunked(b"data: {\x00]\n\n", b"data: [DONE]\n\n"),
            chunked(b"data: 7\n\n"),
            chunked(b"\xff\xfe\n\n\n"),
            chunked(PAGE),
            chunked(b'data: {"choices": [{"index": "x"}]}\n\n'),
            STREAM_HEAD + b"ffff\r\ndata: ",
        )
    )


def failure(random: Random) -> bytes:
    """Return an error of status 500 or above, in an engine's own form or as a proxy's page."""
    return random.choice(
        (
            whole(500, ERROR),
            whole(503, ERROR.replace(b"500", b"503")),
            whole(502, PAGE, "text/html"),
            whole(504, b"", "text/plain"),
        )
    )
