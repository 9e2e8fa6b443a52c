"""The clients file: what it defines, and every mistake that it can contain."""

from datetime import date
from decimal import Decimal
from hashlib import sha256
from pathlib import Path

import pytest

from router.auth.identity import ClientGroup
from router.auth.keys_file import build_directory, hash_of, load, parse
from router.auth.prices import PriceList
from router.core.clients.rate_limits import ClientLimits
from router.errors import ConfigError

KEY = "sk-alice"
ALICE = f'"{hash_of(KEY)}"'
DIGEST = sha256(KEY.encode()).digest()
WHOLE = f"""
clients:
  alice:
    key: {ALICE}
    weight: 2
    group: research
    limits: {{in_flight: 8}}
    expires: 2027-01-31
    models: [m, n]
  bob: {{key: revoked}}
groups:
  research: {{weight: 4, limits: {{tokens_per_minute: 1e5}}, models: [n, o]}}
anonymous:
  weight: 0.5
  limits: {{requests_per_minute: 100}}
  each: {{in_flight: 2}}
  new_per_minute: 10
"""


EUR = "prices:\n  currency: EUR\n  models:\n    m"
"""The beginning of the prices, up to those of the model `m`."""


def test_the_file_defines_the_known_clients() -> None:
    """Each key has its client's name, weight, group, limits, models and expiry."""
    directory = build_directory(parse(WHOLE))
    (identity, until) = directory.keys[DIGEST]
    assert directory.checks
    assert directory.keys.keys() == {DIGEST}
    assert (identity.client, identity.weight, identity.limits) == ("alice", 2.0, ClientLimits(in_flight=8))
    assert identity.group is not None
    name = identity.shared_group or identity.group.name
    assert identity.group == ClientGroup(name, 4.0, ClientLimits(tokens_per_minute=1e5))
    assert identity.models == frozenset({"n"})
    assert until == 1801353600.0
    assert directory.names.keys() == {"alice", "bob"}
    rules = directory.anonymous
    assert rules.group is not None
    assert (rules.allowed, rules.group.weight, rules.group.limits) == (True, 0.5, ClientLimits(requests_per_minute=100))
    assert (rules.limits, rules.new_per_minute) == (ClientLimits(in_flight=2), 10)


def test_an_empty_file_admits_nobody() -> None:
    """An empty file lets nobody in."""
    directory = build_directory(parse(""))
    assert (directory.checks, directory.anonymous.allowed) == (True, False)


def test_a_key_may_have_its_own_expiry() -> None:
    """A key expires at its own expiry or its client's, whichever is earlier."""
    other = hash_of("sk-new")
    text = f'clients: {{a: {{key: ["{other}", "{hash_of(KEY)} until 2026-12-01T00:00:00Z"], expires: 2027-01-31}}}}'
    ends = [entry.until for entry in build_directory(parse(text)).keys.values()]
    assert ends == [1801353600.0, 1796083200.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("clients: [", "line 1"),
        ("clients: 3", "clients: must be a mapping of names to values"),
        ("- a", "must be a mapping of names to values"),
        ("clients: {a: {models: llama}}", "clients: a: models: must be a list: [A, B]"),
        ("? [a]\n: b", "unhashable"),
        ("client: {}", "unknown key client; did you mean clients?"),
        (f"clients: {{a: {{key: {ALICE}}}, a: {{}}}}", "line 1: duplicate name a"),
        ("clients: {a: {wieght: 2}}", "clients: a: unknown key wieght; did you mean weight?"),
        ("clients: {a: {weight: 0}}", "clients: a: weight"),
        ("clients: {a: {weight: .nan}}", "clients: a: weight"),
        ("clients: {a: {weight: inf}}", "clients: a: weight"),
        ("clients: {a: {group: g}}", "no group 'g'"),
        ("clients: {a: {key: sk-secret-in-the-clear}}", "clients: a: key"),
        ("clients: {a: {key: [revoked]}}", "clients: a: key"),
        ("clients: {a: {expires: tomorrow}}", "not a time such as"),
        ("clients: {a: {limits: {in_flight: 0}}}", "in_flight"),
        ("clients: {a: {limits: {in_flight: 1.5}}}", "in_flight"),
        (f"clients: {{a: {{key: {ALICE}}}, b: {{key: {ALICE}}}}}", "b: has the same key as a"),
        ("clients: {user-a: {}}", "'user-a'"),
        ("clients: {'a b': {}}", "'a b'"),
        ("clients: {anonymous: {}}", "'anonymous'"),
        ("groups: {anonymous: {}}", "'anonymous'"),
        ("anonymous: {allowed: perhaps}", "anonymous: allowed"),
        ("prices: {models: {}}", "prices: currency"),
        ("prices: {currency: 3 EUR}", "prices: currency"),
        (f"{EUR}: {{input: 1}}", "prices: models: m: entry 1: output: is missing"),
        (f"{EUR}: {{input: -1, output: 1}}", "prices: models: m: entry 1: input"),
        (f"{EUR}: {{input: inf, output: 1}}", "prices: models: m: entry 1: input"),
        (f"{EUR}: {{input: 1e-10, output: 1}}", "prices: models: m: entry 1: input"),
        (f"{EUR}: {{input: 1, outputs: 1}}", "unknown key outputs; did you mean output?"),
        (f"{EUR}: {{input: 1, output: 1, since: soon}}", "'soon' is not a day such as"),
        (f"{EUR}: []", "prices: models: m"),
        (f"{EUR}: [{{input: 1, output: 1}}, {{input: 2, output: 1}}]", "begin on the same day"),
    ],
)
def test_a_mistake_is_reported_in_one_line(text: str, message: str) -> None:
    """The line names the place of the mistake and does not repeat a value that may be a key."""
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "sk-secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("clients:\n  a: {weight: 2}\n  b:\n    key: revoked\n    weight: 0\n", 5),
        ("clients:\n  a: {weight: 2}\n  b:\n    key: revoked\n    wieght: 1\n", 3),
        (f"{EUR}:\n      - {{input: 1, output: 1}}\n      - {{input: -1, output: 1, since: 2027-01-01}}\n", 6),
        (f"{EUR}:\n      input: 1\n", 4),
    ],
)
def test_a_mistake_is_found_in_its_line(text: str, line: int) -> None:
    """The line is that of the value, or of the entry that lacks a value or has one too many."""
    with pytest.raises(ConfigError, match=rf"^line {line}: "):
        parse(text)


def test_the_file_has_prices() -> None:
    """Cached input costs what other input costs, unless the file says otherwise; later prices come first."""
    prices = build_directory(
        parse(f"{EUR}: [{{input: 1, output: 3}}, {{input: 2, output: 4, since: 2027-01-01}}]")
    ).prices
    new, old = prices.models["m"]
    assert prices.currency == "EUR"
    assert new == (Decimal(2), Decimal(2), Decimal(4), date(2027, 1, 1))
    assert old == (Decimal(1), Decimal(1), Decimal(3), date.min)
    assert build_directory(parse("prices: {currency: USD}")).prices == PriceList("USD", {})
    assert build_directory(parse("")).prices == PriceList()


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """The error for a file that is missing, binary, invalid or empty names the file."""
    missing, binary, wrong, empty = (tmp_path / name for name in ("missing", "binary", "wrong", "empty"))
    empty.write_text("# no client\n")
    binary.write_bytes(b"\xff\xfe")
    wrong.write_text("clients: 3")
    for path in (missing, binary, wrong, empty):
        with pytest.raises(ConfigError, match=path.name):
            load(path)
