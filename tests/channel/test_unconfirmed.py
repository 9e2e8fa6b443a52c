"""What an end keeps until the other end has handled it."""

from hypothesis import given
from hypothesis import strategies as st

from router.channel.unconfirmed import Unconfirmed


@given(st.lists(st.binary(min_size=1, max_size=5), max_size=30), st.integers(0, 40), st.integers(0, 40), st.data())
def test_what_was_not_handled_is_sent_again_or_known_to_be_missing(
    payloads: list[bytes], confirmed: int, begun: int, data: st.DataObject
) -> None:
    """All after any number that the other end may name, in order; None only where too many bytes were sent."""
    most = 40
    kept = Unconfirmed(most)
    kept.begin(begun)
    for payload in payloads:
        kept.add(payload)
    kept.confirm(min(begun + confirmed, begun + len(payloads)))
    handled = data.draw(st.integers(min(confirmed, len(payloads)), len(payloads)))
    found = kept.after(begun + handled)
    missed = payloads[handled:]
    assert found == missed if sum(map(len, missed)) <= most else found is None
