"""Limits of clients and groups as the scheduler's side counts them; tests/auth/test_admission.py tests them over the
channel.
"""

from router.core.clients.rate_limits import ClientLimits, OwnerLimits, RateLimits


def test_a_client_of_a_limited_group_keeps_its_own_limit() -> None:
    """The client's limit holds beside the group's, also in its first two calls at a time, when its limiter is new and
    idle.
    """
    client, group = OwnerLimits("ann", ClientLimits(in_flight=1)), OwnerLimits("team", ClientLimits(in_flight=9), True)
    limits = RateLimits()
    assert limits.begin_call(1, (client, group), 0.0) is None
    shortage = limits.begin_call(2, (client, group), 0.0)
    assert shortage is not None
    assert not shortage.is_group


def test_a_call_that_was_refused_can_end() -> None:
    """The end of a refused call gives nothing back, because the call was never counted."""
    client, limits = OwnerLimits("ann", ClientLimits(in_flight=1)), RateLimits()
    assert limits.begin_call(1, (client,), 0.0) is None
    assert limits.begin_call(2, (client,), 0.0) is not None
    limits.end_call(2, 100, 0.0)
    assert limits.begin_call(3, (client,), 0.0) is not None
    limits.end_call(1, None, 0.0)
    assert limits.begin_call(4, (client,), 0.0) is None
    assert len(limits) == 1


def test_what_is_left_of_a_limit_survives_a_restart() -> None:
    """The next run goes on with it, and what has refilled since counts, too; a limit at its full is not saved."""
    limits, owners = RateLimits(), [OwnerLimits("ann", ClientLimits(requests_per_minute=2.0, tokens_per_minute=60.0))]
    assert limits.begin_call("call", owners, 5.0) is None
    assert limits.take_input("call", 60, 5.0) is None
    assert limits.begin_call("other", [OwnerLimits("bob", ClientLimits(in_flight=1))], 5.0) is None
    limits.end_call("other", None, 5.0)
    windows = [row for piece in limits.saved(15.0) for row in piece.rows]
    assert [(window.owner, window.tokens) for window in windows] == [("ann", 10.0)]
    later = RateLimits()
    later.restore(windows, 1015.0)
    assert later.begin_call("next", owners, 1025.0) is None
    shortage = later.take_input("next", 50, 1025.0)
    assert shortage is not None
    assert shortage.seconds == 30.0
