"""The settings model: which values it accepts and refuses, and how policy parameters reach it."""

from dataclasses import fields

import pytest
from pydantic import SecretStr, ValidationError

from router.config.addresses import WorkerAddress
from router.config.policy_names import NAMED
from router.config.settings import Settings
from router.core.policies.registry import ORDERS, PARAMETERS, PLACEMENTS, POLICIES


def refusal(**given: object) -> str:
    """Return the message with which these values are refused."""
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate(given)
    return str(caught.value.errors()[0]["msg"])


def test_the_defaults_are_valid() -> None:
    """Every default passes its own validation."""
    defaults = Settings()
    assert Settings.model_validate(dict(defaults)) == defaults


def test_settings_are_frozen() -> None:
    """Assigning to a setting raises an error."""
    with pytest.raises(ValidationError, match="frozen"):
        Settings().port = 1


def test_an_unknown_field_is_refused() -> None:
    """A misspelled name in code fails as it does in a file."""
    assert "Extra inputs" in refusal(max_inflght=3)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_may_be_chosen(name: str) -> None:
    """Every policy of the registry is accepted."""
    assert Settings(policy=name).policy == name


def test_an_unknown_policy_is_refused_with_the_names_there_are() -> None:
    """The error lists the named policies, the placements and the orders."""
    reason = refusal(policy="fair")
    assert all(name in reason for name in ["'fair'", *NAMED, *PLACEMENTS, *ORDERS])


def test_every_parameter_class_is_a_group() -> None:
    """Each group of parameters is an instance of its own class, by default and if values are given."""
    assert {name: type(value) for name, value in Settings().parameters().items()} == dict(PARAMETERS)
    for name, kind in PARAMETERS.items():
        first = fields(kind)[0].name
        given = Settings.model_validate({name: {first: "3"}}).parameters()[name]
        assert given == kind(**{first: 3})


@pytest.mark.parametrize("value", ["nan", "inf", "many"])
def test_a_parameter_is_a_finite_number(value: str) -> None:
    """Infinity, NaN and words are refused; an infinite quantum would make every deficit meaningless."""
    assert "number" in refusal(dlpm={"quantum": value})


def test_an_unknown_parameter_is_refused() -> None:
    """A misspelled parameter is refused."""
    assert "Unexpected" in refusal(dlpm={"quantums": 3})


def test_a_worker_is_a_url_or_a_mapping() -> None:
    """A string is the worker's URL; its id is host and port unless it has a name."""
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
    """A URL with more than scheme, host and port is refused, and the message does not repeat it: it may hold a
    password.
    """
    with pytest.raises(ValidationError) as caught:
        WorkerAddress(url=url)
    assert "u:p" not in caught.value.errors()[0]["msg"]


@pytest.mark.parametrize(
    "second", ["http://a:1/", {"url": "http://a:1", "id": "b"}, {"url": "http://c", "id": "a:1"}, {"url": "http://a:1"}]
)
def test_no_worker_is_there_twice(second: object) -> None:
    """Two workers with the same URL or id are refused."""
    assert "a:1 at http://a:1 is listed twice" in refusal(worker=["http://a:1", second])


def test_workers_have_the_role_of_their_list() -> None:
    """Those of all lists are one fleet: none is there twice, and prompts need someone to decode them."""
    lists = {"worker": ["http://a"], "prefill": ["http://p"], "decode": [{"url": "http://d", "rank": 1}]}
    settings = Settings.model_validate(lists)
    assert [(worker.id, worker.role) for worker in settings.workers()] == [
        ("a", "both"),
        ("p", "prefill"),
        ("d@1", "decode"),
    ]
    assert "listed twice" in refusal(prefill=["http://a"], decode=["http://a"])
    assert "has the role decode" in refusal(prefill=[{"url": "http://a", "role": "decode"}], decode=["http://d"])
    assert "no decode worker" in refusal(prefill=["http://p"])
    assert "no decode worker" in refusal(worker=[{"url": "http://p", "role": "prefill"}])


@pytest.mark.parametrize("name", ["", "a b", "a\nb", "ä", "x" * 65, "a@0", "b@1"])
def test_an_id_fits_into_a_header(name: str) -> None:
    """Ids are used in headers and metrics, so they must be short printable ASCII."""
    with pytest.raises(ValidationError, match="must be 1 to 64 letters"):
        WorkerAddress(url="http://a", id=name)


@pytest.mark.parametrize("key", ["operator-key-of-a-file\n", " operator-key-of-a-file", "opérator-key-of-a-file"])
@pytest.mark.parametrize("where", ["worker_api_key", "admin_key", "api_key"])
def test_a_key_fits_into_a_header(where: str, key: str) -> None:
    """A key that no HTTP client can send is refused at start, in words that do not repeat it."""
    given = {"worker": [{"url": "http://a", where: key}]} if where == "api_key" else {where: key}
    message = refusal(**given)
    assert "no spaces or line ends" in message
    assert key.strip() not in message


def test_a_key_may_be_words() -> None:
    """Keys with spaces within worked before keys were checked, and every HTTP client sends them."""
    assert Settings.model_validate({"admin_key": "the words of an operator"}).admin_key is not None


def test_secrets_do_not_show() -> None:
    """Printed settings, as in a log, contain no key."""
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
    """A value outside its range is refused at start."""
    assert refusal(**{name: value})


def test_every_setting_is_documented() -> None:
    """Each field has a description, and each group has its class's docstring."""
    silent = [name for name, field in Settings.model_fields.items() if not field.description]
    assert sorted(silent) == sorted(PARAMETERS)


def test_a_file_of_clients_needs_a_source_that_can_name_one() -> None:
    """A clients file is refused if clients are identified only by `user` or address, which cannot match a key."""
    assert "needs key or header in identity" in refusal(clients="x", identity=["user", "address"])
    assert Settings.model_validate({"clients": "x", "identity": ["key"]}).clients is not None


@pytest.mark.parametrize("network", ["10.0.0.0/33", "10.0.0.1/8", "proxy", ""])
def test_a_trusted_proxy_is_an_address_or_a_network(network: str) -> None:
    """A host name, or a network with host bits set, is refused."""
    assert refusal(trusted_proxy=[network])


@pytest.mark.parametrize("url", ["http://host/name", "redis://host", "valkey:///name", "redis://host/two/names"])
def test_a_cluster_is_a_store_and_a_name(url: str) -> None:
    """Another URL is refused, without its text: it can contain a password."""
    assert url not in refusal(cluster=url)


def test_replicas_that_others_can_reach_need_a_secret() -> None:
    """On a loopback address they need none; where there is no cluster, nobody listens."""
    away = {"cluster": "valkey://host:6379/name", "cluster_address": "10.0.0.5:7000"}
    assert "cluster_secret_file" in refusal(**away)
    assert Settings.model_validate({**away, "cluster_secret_file": "/secret"}).cluster_address == "10.0.0.5:7000"
    assert Settings.model_validate({**away, "cluster_address": "[::1]:0"}).cluster is not None
    assert "HOST:PORT" in refusal(cluster_address="10.0.0.5")


def test_tls_between_replicas_needs_all_its_files() -> None:
    """With one of them missing, nobody could be verified."""
    files = {"cluster_tls_cert": "/cert", "cluster_tls_key": "/key", "cluster_tls_ca": "/ca"}
    assert Settings.model_validate({"cluster": "valkey://host/name", **files}).cluster_tls_ca is not None
    for name in files:
        assert "cluster_tls_cert" in refusal(cluster="valkey://host/name", **{**files, name: None})


def test_a_lease_in_kubernetes_needs_a_store_for_the_state() -> None:
    """A Lease holds none. With the lease in a store there is no second one."""
    store = "valkey://host:6379/llm"
    assert "cluster_store" in refusal(cluster="kubernetes")
    assert "cluster_store" in refusal(cluster=store, cluster_store=store)
    assert "lower-case letters" in refusal(cluster="kubernetes", cluster_store="valkey://host:6379/LLM")
    settings = Settings.model_validate({"cluster": "kubernetes", "cluster_store": store})
    assert (settings.leads_by_kubernetes, settings.store_url) == (True, store)
    settings = Settings.model_validate({"cluster": store})
    assert (settings.leads_by_kubernetes, settings.store_url) == (False, store)


def test_the_state_of_a_cluster_has_one_place() -> None:
    """A folder for the state beside the store is refused."""
    assert "in its store" in refusal(cluster="valkey://host/name", state="/folder")
