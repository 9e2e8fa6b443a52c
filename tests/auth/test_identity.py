import string
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.auth.identity import (
    ANONYMOUS,
    ID_LENGTH,
    AnonymousPolicy,
    ClientDirectory,
    ClientGroup,
    Identifier,
    Identity,
    IdentitySource,
    ResolvedClient,
    is_allowed_name,
)
from router.core.model.request import ClientId, GroupId
from router.errors import ConfigError, InvalidKey

KEY = b"sk-very-secret"
KEY_ID = f"key-{sha256(KEY).hexdigest()[:32]}"
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
    assert client(Identifier(trusted_headers=["X-Client-Id"]), headers, None, "127.0.0.1") == "header-alice"
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


def clients(**anonymous: Any) -> ClientDirectory:
    """Return a directory with Alice, whose key is `KEY`, and Bob, whose key has expired."""
    alice = ResolvedClient(Identity(ClientId("alice"), 3.0))
    bob = ResolvedClient(Identity(ClientId("bob")), until=1000.0)
    keys = {sha256(KEY).digest(): alice, sha256(b"sk-old").digest(): bob}
    return ClientDirectory(
        keys, {"alice": alice, "bob": bob}, AnonymousPolicy(**{"allowed": False, **anonymous}), checks=True
    )


def bearer(key: bytes) -> dict[bytes, bytes]:
    return {b"authorization": b"Bearer " + key}


def test_a_known_key_names_its_client() -> None:
    """The client has the name and weight of the file and is not anonymous."""
    found = Identifier(directory=clients()).identify(bearer(KEY), "mallory", "10.0.0.7")
    assert (found.client, found.weight, found.anonymous) == ("alice", 3.0, False)


@pytest.mark.parametrize("anonymous", [True, False])
@pytest.mark.parametrize("key", [b"sk-unknown", b"sk-old", KEY + b"x"])
def test_an_invalid_key_is_refused(key: bytes, anonymous: bool) -> None:
    """An unknown or expired key is refused even if anonymous calls are allowed, and the error does not repeat it."""
    identifier = Identifier(directory=clients(allowed=anonymous), clock=lambda: 1000.0)
    with pytest.raises(InvalidKey) as caught:
        identifier.identify(bearer(key), "alice", "10.0.0.7")
    assert key.decode() not in str(caught.value)


def test_a_key_is_valid_until_it_expires() -> None:
    """A key is accepted one second before it expires."""
    assert Identifier(directory=clients(), clock=lambda: 999.0).identify(bearer(b"sk-old"), None, None).client == "bob"


@pytest.mark.parametrize("headers", [{}, bearer(b"EMPTY")])
def test_who_has_no_key_is_anonymous_or_refused(headers: dict[bytes, bytes]) -> None:
    """Anonymous calls follow the policy of the file; a placeholder that client libraries send counts as no key."""
    group = ClientGroup(GroupId("anonymous"), 0.5)
    found = Identifier(directory=clients(allowed=True, group=group)).identify(headers, "carol", "10.0.0.7")
    assert (found.client, found.shared_group, found.group_weight, found.anonymous) == (
        *("user-carol", "anonymous", 0.5),
        True,
    )
    with pytest.raises(InvalidKey):
        Identifier(directory=clients()).identify(headers, "carol", "10.0.0.7")


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("127.0.0.1", "alice"),
        ("10.1.2.3", "alice"),
        ("::ffff:10.1.2.3", "alice"),
        ("11.0.0.1", "user-eve"),
        ("::1", "user-eve"),
        (None, "user-eve"),
        ("no address", "user-eve"),
    ],
)
def test_a_header_counts_only_from_trusted_addresses(address: str | None, client: str) -> None:
    """A client header from an untrusted address is ignored, and the call is identified by its other sources."""
    identifier = Identifier(
        trusted_headers=["x-client-id"], proxies=["127.0.0.1", "10.0.0.0/8"], directory=clients(allowed=True)
    )
    assert identifier.identify({b"x-client-id": b"alice"}, "eve", address).client == client


def test_by_default_only_this_machine_is_trusted() -> None:
    """A client header from another machine is ignored unless the operator trusts that machine."""
    identifier = Identifier(trusted_headers=["x-client-id"])
    assert identifier.identify({b"x-client-id": b"alice"}, None, "192.168.0.1").client == "address-192.168.0.1"


@given(st.sampled_from([*IdentitySource]), st.text(min_size=1, max_size=30))
def test_no_name_in_the_file_equals_the_id_of_another_client(source: IdentitySource, name: str) -> None:
    """The file cannot give a client a name that the router gives to unknown clients."""
    assert not is_allowed_name(f"{source}-{name}")
    assert not is_allowed_name(ANONYMOUS)
    assert is_allowed_name("alice")


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
def test_no_name_can_impersonate_another_source(name: str) -> None:
    """A chosen user name never equals an id of a key, of a trusted header or of a shortened name."""
    user = client(Identifier(), [], name)
    shortened = client(Identifier(), [], "long" * 40)
    assert user not in {
        KEY_ID,
        client(Identifier(trusted_headers=["h"]), [(b"h", name.encode("utf-8", "replace"))], None, "::1"),
    }
    assert client(Identifier(), [], shortened.removeprefix("user-")) != shortened
