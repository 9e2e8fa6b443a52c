"""Bad inputs in HTTP, in paths and methods, and in the identity of the client."""

from typing import Final

from tests.bad_input.inputs import (
    ADMIN_KEY,
    CHAT,
    COMPLETIONS,
    GOOD,
    SERVED,
    BadInput,
    Reply,
    chat,
    chunks,
    drain,
    forwarded,
    get,
    invalid_http,
    not_an_operator,
    of_length,
    post,
    request,
    unknown_path,
    wrong_method,
)

NO_METHOD: Final = "Invalid method encountered"
NO_TOKEN: Final = "Invalid header token"
NO_URL: Final = "Invalid char in url path"
NO_LENGTH: Final = "Invalid character in Content-Length"
NO_SIZE: Final = "Invalid character in chunk size"
HEAD_TOO_LARGE: Final = Reply(431, "headers_too_large", None, "The headers are larger than 65536 bytes.")
BODY_TOO_LARGE: Final = Reply(413, "body_too_large", None, "The body is larger than 16777216 bytes.")
ONE_HOST: Final = Reply(400, "invalid_http", None, "A request must have one Host header.")
UNSUPPORTED_VERSION: Final = Reply(400, "invalid_http", None, "Only HTTP/1.0 and HTTP/1.1 are supported.")
UNSUPPORTED_CODING: Final = Reply(
    400, "invalid_http", None, "The only supported transfer encoding is chunked, and only in HTTP/1.1."
)

HTTP: Final = (
    invalid_http("no HTTP", b"nonsense\r\n\r\n", NO_METHOD),
    invalid_http("the beginning of TLS", b"\x16\x03\x01\x02\x00", NO_METHOD),
    invalid_http("the beginning of HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "HTTP/2 is not supported"),
    invalid_http("HTTP/3.7", request(b"GET", b"/health", version=b"HTTP/3.7"), "Invalid HTTP version"),
    invalid_http("no path", b"GET HTTP/1.1\r\n\r\n", "Unexpected char in url schema"),
    invalid_http("method `BREW`", request(b"BREW", b"/health"), NO_METHOD),
    invalid_http("method `get`", request(b"get", b"/health"), NO_METHOD),
    BadInput(
        "method `CONNECT`",
        request(b"CONNECT", b"example.com:443"),
        Reply(400, "invalid_http", None, "CONNECT is not supported: this server is not a proxy."),
    ),
    invalid_http("a control character in the URL", get(b"/\x01"), NO_URL),
    invalid_http("a NUL in the URL", get(b"/\x00"), NO_URL),
    invalid_http("a URL that is not ASCII", get("/é".encode()), NO_URL),
    invalid_http("a URL whose host is broken", get(b"http://[::1/health"), "Invalid URL"),
    invalid_http("a header with a space before its colon", get(b"/health", b"x : y"), NO_TOKEN),
    invalid_http("a folded header", get(b"/health", b"x: a", b" b"), "Unexpected whitespace after header value"),
    invalid_http("a NUL in a header", get(b"/health", b"x: a\x00b"), "Invalid header value char"),
    invalid_http("a lone CR in a header", get(b"/health", b"x: a\rb"), "Missing expected LF after header value"),
    invalid_http("a header without a name", get(b"/health", b": y"), NO_TOKEN),
    invalid_http("a header without a colon", get(b"/health", b"x"), NO_TOKEN),
    invalid_http("a header's name that is not ASCII", get(b"/health", "é: y".encode()), NO_TOKEN),
    invalid_http(
        "lines that end in LF only", b"GET /health HTTP/1.1\nhost: localhost\n\n", "Expected CRLF after version"
    ),
    BadInput("a header of 70 kB", get(b"/health", b"x: " + b"y" * 70_000), HEAD_TOO_LARGE),
    BadInput("12,000 headers", get(b"/health", *[b"x: y"] * 12_000), HEAD_TOO_LARGE),
    BadInput("a header that does not end", b"GET /health HTTP/1.1\r\nx: " + b"y" * 70_000, HEAD_TOO_LARGE),
    BadInput("40,000 blank lines", b"\r\n" * 40_000, HEAD_TOO_LARGE),
    BadInput("a URL that does not end", b"GET /" + b"x" * 70_000, HEAD_TOO_LARGE),
    BadInput(
        "a URL of 9 kB",
        get(b"/" + b"x" * 9000),
        Reply(414, "url_too_long", None, "The URL is longer than 8192 bytes."),
    ),
    BadInput(
        "headers that do not end",
        b"GET /health HTTP/1.1\r\nx: ",
        Reply(408, "request_timeout", None, "The headers of the request did not arrive in time."),
    ),
    BadInput("two hosts", get(b"/health", b"host: y"), ONE_HOST),
    BadInput("no host", b"GET /health HTTP/1.1\r\n\r\n", ONE_HOST),
    BadInput("no host in HTTP/1.0", b"GET /health HTTP/1.0\r\n\r\n", SERVED),
    BadInput(
        "another server's host name",
        b"GET /health HTTP/1.1\r\nhost: evil.example\r\n\r\n",
        Reply(
            403,
            "host_not_allowed",
            None,
            "The router is not known as `evil.example`; its operator can add that name with --allowed-hosts.",
        ),
    ),
    BadInput("RTSP/1.0", request(b"GET", b"/health", version=b"RTSP/1.0"), UNSUPPORTED_VERSION),
    BadInput("HTTP/0.9", b"GET /health\r\n\r\n", UNSUPPORTED_VERSION),
    BadInput(
        "HTTP/1 syntax with version HTTP/2.0", request(b"GET", b"/health", version=b"HTTP/2.0"), UNSUPPORTED_VERSION
    ),
    BadInput("an unknown `expect`", post(GOOD, b"expect: 200-maybe"), forwarded()),
    BadInput("an upgrade to HTTP/2", post(GOOD, b"connection: upgrade", b"upgrade: h2c"), forwarded()),
    wrong_method("a WebSocket", get(CHAT, b"connection: upgrade", b"upgrade: websocket"), "GET", "POST"),
)
BODY_ENDS: Final = (
    invalid_http("two lengths", post(GOOD, b"content-length: 1"), "Duplicate Content-Length"),
    invalid_http("one length twice", post(GOOD, b"content-length: %d" % len(GOOD)), "Duplicate Content-Length"),
    invalid_http("a list of lengths", of_length(b" 2, 2"), NO_LENGTH),
    invalid_http("length -5", of_length(b" -5"), NO_LENGTH),
    invalid_http("length +2", of_length(b" +2"), NO_LENGTH),
    invalid_http("length 0x2", of_length(b" 0x2"), NO_LENGTH),
    invalid_http("an empty length", of_length(b""), "Empty Content-Length"),
    invalid_http("length 2^64", of_length(b" 18446744073709551616"), "Content-Length overflow"),
    BadInput(
        "white space around a length",
        request(b"POST", CHAT, b"content-length: \t%d \t" % len(GOOD), body=GOOD),
        forwarded(),
    ),
    BadInput("a length of 100 GB", of_length(b" 99999999999"), BODY_TOO_LARGE),
    invalid_http(
        "a length, and chunks",
        chunks(b"0\r\n\r\n", b"content-length: 2", b"transfer-encoding: chunked"),
        "Transfer-Encoding can't be present with Content-Length",
    ),
    invalid_http(
        "chunks, and a length",
        chunks(b"0\r\n\r\n", b"transfer-encoding: chunked", b"content-length: 2"),
        "Content-Length can't be present with Transfer-Encoding",
    ),
    invalid_http(
        "`transfer-encoding: chunked, identity`",
        chunks(b"0\r\n\r\n", b"transfer-encoding: chunked, identity"),
        "Invalid `Transfer-Encoding` header value",
    ),
    BadInput(
        "`transfer-encoding: gzip, chunked`",
        chunks(b"0\r\n\r\n", b"transfer-encoding: gzip, chunked"),
        UNSUPPORTED_CODING,
    ),
    BadInput(
        "`transfer-encoding` in two lines",
        chunks(b"0\r\n\r\n", b"transfer-encoding: gzip", b"transfer-encoding: chunked"),
        UNSUPPORTED_CODING,
    ),
    BadInput("`transfer-encoding: xchunked`", chunks(b"0\r\n\r\n", b"transfer-encoding: xchunked"), UNSUPPORTED_CODING),
    BadInput("chunks in HTTP/1.0", chunks(b"0\r\n\r\n").replace(b"HTTP/1.1", b"HTTP/1.0"), UNSUPPORTED_CODING),
    invalid_http("a chunk of size zz", chunks(b"zz\r\n"), NO_SIZE),
    invalid_http("a chunk of size -2", chunks(b"-2\r\n{}\r\n0\r\n\r\n"), NO_SIZE),
    invalid_http("a chunk of size 0x2", chunks(b"0x2\r\n{}\r\n0\r\n\r\n"), NO_SIZE),
    invalid_http("a chunk of size 2^68", chunks(b"FFFFFFFFFFFFFFFFF\r\n"), "Chunk size overflow"),
    invalid_http("a chunk larger than its size", chunks(b"2\r\n{}}}\r\n0\r\n\r\n"), "Expected LF after chunk data"),
    invalid_http("chunks that end in LF only", chunks(b"2\n{}\n0\n\n"), "Missing expected CR after chunk size"),
    BadInput("17 MiB in chunks", chunks((b"100000\r\n" + b" " * 2**20 + b"\r\n") * 17), BODY_TOO_LARGE),
    BadInput(
        "a length that is too small",
        post(GOOD).replace(b"content-length: %d" % len(GOOD), b"content-length: 9"),
        Reply(
            400,
            "invalid_json",
            None,
            "The body is not valid JSON: unexpected end of data: line 1 column 10 (char 9).",
        ),
    ),
    BadInput(
        "a length that is too large",
        post(GOOD)[:-1],
        Reply(408, "request_timeout", None, "The body of the request did not arrive in time."),
    ),
    BadInput(
        "chunks that do not end",
        chunks(b"5\r\n{"),
        Reply(408, "request_timeout", None, "The body of the request did not arrive in time."),
    ),
)
PATHS: Final = (
    wrong_method("GET on an endpoint", get(CHAT), "GET", "POST"),
    wrong_method("DELETE on an endpoint", request(b"DELETE", COMPLETIONS), "DELETE", "POST"),
    wrong_method("OPTIONS on an endpoint", request(b"OPTIONS", CHAT), "OPTIONS", "POST"),
    wrong_method("POST to `/health`", post(b"{}", path=b"/health"), "POST", "GET"),
    wrong_method("PUT to `/metrics`", request(b"PUT", b"/metrics"), "PUT", "GET"),
    unknown_path("another API version", post(GOOD, path=b"/v2/chat/completions"), "/v2/chat/completions"),
    unknown_path("an engine's admin path", post(GOOD, path=b"/v1/loads"), "/v1/loads"),
    unknown_path("a leading double slash", post(GOOD, path=b"/" + CHAT), "//v1/chat/completions"),
    unknown_path("upper case", post(GOOD, path=b"/V1/completions"), "/V1/completions"),
    unknown_path("no `/v1`", post(GOOD, path=b"/chat/completions"), "/chat/completions"),
    BadInput("an endpoint that the router does not know", post(GOOD, path=b"/v1/other"), forwarded()),
    unknown_path("the root", get(b"/"), "/"),
    unknown_path("a path traversal", get(b"/v1/../../etc/passwd"), "/v1/../../etc/passwd"),
    unknown_path("bytes that are not text", get(b"/%00%ff"), "/\0\ufffd"),
    unknown_path("5000 letters, of which the reply has 199", get(b"/" + b"x" * 5000), "/" + "x" * 199),
    BadInput(
        "a model that no worker serves, at /v1/models",
        get(b"/v1/models/other"),
        Reply(404, "model_not_found", "model", "The model `other` does not exist."),
    ),
    BadInput(
        "an explanation of an unknown request",
        get(b"/explain/other"),
        Reply(404, "unknown_request", None, "The request `other` is unknown or too old."),
    ),
)
NAMES: Final = (
    not_an_operator("an admin call without a key"),
    not_an_operator("an admin call with a wrong key", b"authorization: Bearer wrong"),
    not_an_operator("an admin call with the key as password", b"authorization: Basic " + ADMIN_KEY.encode()),
    not_an_operator("an admin call with the key without `Bearer`", b"authorization: " + ADMIN_KEY.encode()),
    not_an_operator("an admin call with a key that is not ASCII", b"authorization: Bearer \xe9"),
    BadInput(
        "an admin call for an unknown worker",
        drain(b"authorization: Bearer " + ADMIN_KEY.encode(), worker=b"other"),
        Reply(404, "unknown_worker", None, "There is no worker `other`."),
    ),
    wrong_method("an admin call with GET", get(b"/workers/w/drain"), "GET", "POST"),
    BadInput("no key", post(GOOD), forwarded()),
    BadInput("an empty key", post(GOOD, b"authorization: Bearer "), forwarded()),
    BadInput("a user name and password", post(GOOD, b"authorization: Basic YTpi"), forwarded()),
    BadInput(
        "a key that is not ASCII",
        post(GOOD, b"authorization: Bearer \xff\xfe"),
        forwarded("key-b3d510ef04275ca8e698e5b3cbb0ece3"),
    ),
    BadInput("a forged address", post(GOOD, b"x-forwarded-for: 10.0.0.1", b"forwarded: for=10.0.0.1"), forwarded()),
    BadInput("a forged name, in an untrusted header", post(GOOD, b"x-d2lpm-client: key-1"), forwarded()),
    BadInput(
        "`user` posing as another's key",
        chat(user="key-b3d510ef04275ca8e698e5b3cbb0ece3"),
        forwarded("user-key-b3d510ef04275ca8e698e5b3cbb0ece3"),
    ),
    BadInput(
        "`user` of 200 special characters",
        chat(user='é\n"|' * 50),
        forwarded("user-%C3%A9%0A%22%7C%C3%A9%0A%2+a7e100a43d2ef46d56d775172fd6f308"),
    ),
    BadInput("a request id of 500 letters", post(GOOD, b"x-request-id: " + b"x" * 500), forwarded()),
)
