"""Which source of token ids is used for a client's calls to a model."""

from router.core.model.request import ClientId
from router.kv_events.token_sources import MAX_MISCOUNTS, PAIRS_KEPT, TokenSource, TokenSources

ANN = ClientId("ann")


def miscount(sources: TokenSources, client: ClientId, model: str = "m") -> None:
    """Report that an engine has counted a prompt of a client otherwise than the source that is used for it."""
    sources.compare(model, client, sources.of(model, client), 10, 11)


def test_a_source_is_given_up_for_one_client_and_model() -> None:
    """A client whose calls no source counts rightly takes nothing from others."""
    sources = TokenSources(TokenSource.LOCAL)
    for expected in (TokenSource.LOCAL, TokenSource.WORKER, TokenSource.NONE):
        assert sources.of("m", ANN) is expected
        for _ in range(MAX_MISCOUNTS if expected is not TokenSource.NONE else 0):
            miscount(sources, ANN)
    assert sources.of("m", ClientId("bob")) is TokenSource.LOCAL
    assert sources.of("other", ANN) is TokenSource.LOCAL


def test_a_count_by_a_source_that_was_given_up_since_says_nothing() -> None:
    """Calls that were sent before may end later."""
    sources = TokenSources(TokenSource.LOCAL)
    for _ in range(3 * MAX_MISCOUNTS):
        sources.compare("m", ANN, TokenSource.LOCAL, 10, 11)
    assert sources.of("m", ANN) is TokenSource.WORKER


def test_clients_without_number_take_bounded_memory() -> None:
    """The one not seen for longest is forgotten, and begins again."""
    sources = TokenSources(TokenSource.LOCAL)
    for _ in range(MAX_MISCOUNTS):
        miscount(sources, ANN)
    for number in range(PAIRS_KEPT):
        miscount(sources, ClientId(str(number)))
    assert sources.of("m", ANN) is TokenSource.LOCAL
