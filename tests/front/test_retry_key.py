"""What a call and its repetition have in common."""

from router.front.gateway import _retry_key


def key_of(given: bytes, path: str = "/v1/completions", body: bytes = b"{}") -> bytes:
    return _retry_key(given, path, body)


def test_only_the_same_key_path_and_body_are_a_repetition() -> None:
    """Wherever one of them ends and the next begins."""
    calls = [
        key_of(b"a"),
        key_of(b"b"),
        key_of(b"a", "/v1/chat/completions"),
        key_of(b"a", body=b"{} "),
        key_of(b"a/", "v1/completions"),
    ]
    assert len({*calls}) == len(calls)
    assert key_of(b"a") == calls[0]
