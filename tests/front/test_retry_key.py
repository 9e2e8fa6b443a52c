"""What a call and its repetition have in common."""

from types import SimpleNamespace
from typing import cast

from router.front.exchange import Exchange
from router.front.gateway import _retry_key


def key_of(given: bytes | None, path: str = "/v1/completions", body: bytes = b"{}") -> bytes | None:
    headers = {} if given is None else {b"idempotency-key": given}
    return _retry_key(cast("Exchange", SimpleNamespace(headers=headers, path=path)), body)


def test_only_the_same_key_path_and_body_are_a_repetition() -> None:
    """Wherever one of them ends and the next begins; without a key, nothing is a repetition."""
    calls = [
        key_of(b"a"),
        key_of(b"b"),
        key_of(b"a", "/v1/chat/completions"),
        key_of(b"a", body=b"{} "),
        key_of(b"a/", "v1/completions"),
    ]
    assert len({*calls}) == len(calls)
    assert key_of(b"a") == calls[0] is not None
    assert key_of(None) is key_of(b"") is None
