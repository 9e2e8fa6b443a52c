import string
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import ConfigError
from router.identity import ANONYMOUS, ID_LENGTH, Identifier, Identity

KEY = b"sk-very-secret"
KEY_ID = f"key-{sha256(KEY).hexdigest()[:12]}"
SAFE = set(string.ascii_letters + string.digits + "-_.~@:%+")

Headers = list[tuple[bytes, bytes]]


def client(identifier: Identifier, headers: Headers, user: str | None = None, address: str | None = None) -> str:
    return identifier.identify(dict(headers), user, address).client


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"Bearer " + KEY)],
        [(b"authorization", b"bearer " + KEY)],
        [(b"authorization", b"  BEARER   " + KEY + b" ")],
        [(b"x-api-key", KEY)],
        [(b"authorization", b"Basic abc"), (b"x-api-key", KEY)],
        [(b"authorization", b"Bearer "), (b"x-api-key", KEY)],
    ],
)
def test_key_is_found_and_only_its_digest_shows(headers: Headers) -> None:
    """Every usual way to send one key names one client, without the key in the name."""
    assert client(Identifier(), headers, "alice", "127.0.0.1") == KEY_ID


def test_default_order_is_key_then_user_then_address() -> None:
    """Without trusted headers a key wins over the user field, and that over the address."""
    identifier = Identifier()
    headers = [(b"x-client-id", b"alice")]
    assert client(identifier, headers, "bob", "127.0.0.1") == "user-bob"
    assert client(identifier, headers, None, "::1") == "address-::1"
    assert client(identifier, headers, "", "10.0.0.7") == "address-10.0.0.7"
    assert client(identifier, headers, None, None) == ANONYMOUS


def test_header_counts_only_where_it_is_trusted() -> None:
    """A trusted header names the client even beside a key; any other header is ignored."""
    headers = [(b"authorization", b"Bearer " + KEY), (b"x-client-id", b"alice")]
    assert client(Identifier(trusted_headers=["X-Client-Id"]), headers) == "header-alice"
    assert client(Identifier(trusted_headers=["x-team"]), headers) == KEY_ID


def test_order_can_be_chosen() -> None:
    """Only the configured sources count, in their order."""
    headers = [(b"authorization", b"Bearer " + KEY)]
    assert client(Identifier(order=["address", "key"]), headers, "bob", "127.0.0.1") == "address-127.0.0.1"
    assert client(Identifier(order=["address", "key"]), headers, "bob", None) == KEY_ID
    assert client(Identifier(order=["address"]), headers, "bob", None) == ANONYMOUS


def test_unknown_source_is_a_configuration_error() -> None:
    """A misspelled source stops the start with a line that names the choices."""
    with pytest.raises(ConfigError, match="key, header, user, address"):
        Identifier(order=["cookie"])


def test_weights_are_by_client_id() -> None:
    """A client has its configured weight, everybody else has 1."""
    identifier = Identifier(weights={"user-alice": 3.0})
    assert identifier.identify({}, "alice", None) == Identity(
        client=identifier.identify({}, "alice", None).client, weight=3.0
    )
    assert identifier.identify({}, "bob", None).weight == 1.0


@given(st.text(min_size=1, max_size=200))
def test_ids_are_short_and_printable(user: str) -> None:
    """Whatever the name, the id is safe for logs, headers and metric labels, and keeps its source."""
    name = client(Identifier(), [], user)
    assert name.startswith("user-")
    assert len(name) <= ID_LENGTH
    assert set(name) <= SAFE


@given(st.text(min_size=1, max_size=80), st.text(min_size=1, max_size=80))
def test_distinct_names_give_distinct_ids(one: str, other: str) -> None:
    """Escaping and shortening never merge two clients, even with a common start longer than an id."""
    identifier, stem = Identifier(), "s" * 70
    assert (client(identifier, [], one) == client(identifier, [], other)) == (one == other)
    assert (client(identifier, [], stem + one) == client(identifier, [], stem + other)) == (one == other)


@given(st.text(min_size=1, max_size=60))
def test_no_name_can_pose_as_another_source(name: str) -> None:
    """A chosen user name never equals an id of a key, of a trusted header or of a shortened name."""
    user = client(Identifier(), [], name)
    shortened = client(Identifier(), [], "long" * 40)
    assert user not in {KEY_ID, client(Identifier(trusted_headers=["h"]), [(b"h", name.encode("utf-8", "replace"))])}
    assert client(Identifier(), [], shortened.removeprefix("user-")) != shortened
