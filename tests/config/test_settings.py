"""The settings model: what it takes, what it refuses, and how the parameters of policies get in."""

from dataclasses import fields

import pytest
from pydantic import SecretStr, ValidationError

from router.config.settings import NAMED, Settings, WorkerAddress
from router.core.policies.registry import ORDERS, PARAMETERS, PLACEMENTS, POLICIES


def refusal(**given: object) -> str:
    """Why these values are refused."""
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate(given)
    return str(caught.value.errors()[0]["msg"])


def test_the_defaults_are_valid() -> None:
    """Every default would also be taken if somebody wrote it down."""
    defaults = Settings()
    assert Settings.model_validate(dict(defaults)) == defaults


def test_settings_are_frozen() -> None:
    """Nobody changes a setting behind the back of those who have read it."""
    with pytest.raises(ValidationError, match="frozen"):
        Settings().port = 1


def test_an_unknown_field_is_refused() -> None:
    """A misspelled name in code fails, as it does in a file."""
    assert "Extra inputs" in refusal(max_inflght=3)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_may_be_chosen(name: str) -> None:
    """The table of policies is the list of choices."""
    assert Settings(policy=name).policy == name


def test_an_unknown_policy_is_refused_with_the_names_there_are() -> None:
    """The error lists the named policies, the placements and the orders."""
    reason = refusal(policy="fair")
    assert all(name in reason for name in ["'fair'", *NAMED, *PLACEMENTS, *ORDERS])


def test_every_parameter_class_is_a_group() -> None:
    """Parameters come under the name of their group, as an instance of their own class, default or given."""
    assert {name: type(value) for name, value in Settings().parameters().items()} == dict(PARAMETERS)
    for name, kind in PARAMETERS.items():
        first = fields(kind)[0].name
        given = Settings.model_validate({name: {first: "3"}}).parameters()[name]
        assert given == kind(**{first: 3})


@pytest.mark.parametrize("value", ["nan", "inf", "many"])
def test_a_parameter_is_a_finite_number(value: str) -> None:
    """A quantum of infinity would make every counter useless."""
    assert "number" in refusal(dlpm={"quantum": value})


def test_an_unknown_parameter_is_refused() -> None:
    """A misspelled parameter is no parameter."""
    assert "Unexpected" in refusal(dlpm={"quantums": 3})


def test_a_worker_is_a_url_or_a_mapping() -> None:
    """A text is a URL; its id is host and port unless it has a name."""
    plain, named = Settings.model_validate(
        {"worker": ["http://a:8000/", {"url": "https://b", "id": "west", "api_key": "k"}]}
    ).worker
    assert (plain.url, plain.id, plain.api_key) == ("http://a:8000", "a:8000", None)
    assert (named.url, named.id, named.api_key) == ("https://b", "west", SecretStr("k"))


@pytest.mark.parametrize(
    "url",
    ["", "a:8000", "ftp://a", "http://", "http://a:99999", "http://a:b", "http://a/v1", "http://a?x", "http://u:p@a"],
)
def test_a_worker_is_the_root_of_an_http_server(url: str) -> None:
    """Whatever is not scheme, host and port alone is refused, without repeating it: it may hold a password."""
    with pytest.raises(ValidationError) as caught:
        WorkerAddress(url=url)
    assert "u:p" not in caught.value.errors()[0]["msg"]


@pytest.mark.parametrize(
    "second", ["http://a:1/", {"url": "http://a:1", "id": "b"}, {"url": "http://c", "id": "a:1"}, {"url": "http://a:1"}]
)
def test_no_worker_is_there_twice(second: object) -> None:
    """Two entries with one URL or one id would be one worker with two windows."""
    assert "a:1 at http://a:1 is there twice" in refusal(worker=["http://a:1", second])


@pytest.mark.parametrize("name", ["", "a b", "a\nb", "ä", "x" * 65])
def test_an_id_fits_into_a_header(name: str) -> None:
    """Ids go into headers and metrics, so they are short printable ASCII."""
    with pytest.raises(ValidationError, match="pattern"):
        WorkerAddress(url="http://a", id=name)


def test_secrets_do_not_show() -> None:
    """Printing the settings, as a log may, tells no key."""
    given = Settings.model_validate(
        {
            "worker_api_key": "hush-hush-1",
            "hash_secret": "hush-hush-hush-2",
            "worker": [{"url": "http://a", "api_key": "hush-hush-3"}],
        }
    )
    assert "hush" not in repr(given) + str(given)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", 65536),
        ("max_inflight", 0),
        ("max_unstarted_tokens", 0),
        ("max_queued", -1),
        ("queue_ttl", 0),
        ("queue_ttl", "nan"),
        ("heartbeat", -1),
        ("poll_interval", 0),
        ("body_limit", 0),
        ("extend_weight", 0),
        ("identity", []),
        ("identity", ["passport"]),
        ("hash_secret", "short"),
        ("window", "open"),
        ("log_level", "chatty"),
    ],
)
def test_a_value_that_cannot_work_is_refused(name: str, value: object) -> None:
    """A setting out of its range is refused at start, not noticed in the night."""
    assert refusal(**{name: value})


def test_every_setting_is_documented() -> None:
    """Each field says what it is; the groups say it in their own class."""
    silent = [name for name, field in Settings.model_fields.items() if not field.description]
    assert sorted(silent) == sorted(PARAMETERS)


def test_a_file_of_clients_needs_a_source_that_can_name_one() -> None:
    """By `user` or address nobody is known."""
    assert "neither key nor header" in refusal(clients="x", identity=["user", "address"])
    assert Settings.model_validate({"clients": "x", "identity": ["key"]}).clients is not None


@pytest.mark.parametrize("network", ["10.0.0.0/33", "10.0.0.1/8", "proxy", ""])
def test_a_trusted_proxy_is_an_address_or_a_network(network: str) -> None:
    """A name, or a network with bits behind its end, is a mistake."""
    assert refusal(trusted_proxy=[network])
