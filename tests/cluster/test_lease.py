"""The rules of the lease: who may take it when, and when a leader goes on or ends."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.cluster.lease import (
    BUSY_SECONDS,
    HAND_OVER_SECONDS,
    LEASE_SECONDS,
    LONGEST_LEASE_SECONDS,
    LONGEST_POLL_SECONDS,
    LONGEST_START_SECONDS,
    POLL_SECONDS,
    RETURN_SECONDS,
    START_SECONDS,
    Candidacy,
    LeaderRecord,
    Renewal,
    StoreView,
    Tenure,
)

UNSERVED_SECONDS = LONGEST_START_SECONDS + START_SECONDS
"""For how long a run can have the lease that does not serve."""


def record(epoch: int, replica: str = "a") -> LeaderRecord:
    return LeaderRecord(epoch, replica, f"run-{epoch}", "127.0.0.1:7", 12.5)


def test_a_record_survives_its_way_through_the_store() -> None:
    """What is stored is read back; other text is no record."""
    assert LeaderRecord.decode(record(7).encoded()) == record(7)
    with pytest.raises(ValueError, match="not enough values"):
        LeaderRecord.decode("nobody")


def test_a_free_lease_is_taken_and_that_of_another_is_not() -> None:
    """On the first day there is neither a leader nor an epoch."""
    candidacy = Candidacy("b")
    assert candidacy.may_take(StoreView(None, 0), 0.0)
    assert not candidacy.may_take(StoreView(record(1), 1), 0.1)
    assert candidacy.may_take(StoreView(None, 1), 0.2)


def test_a_lease_that_was_given_up_is_left_alone_until_all_fronts_look_often() -> None:
    """So they all come to the next leader at once; one that has ended is taken at the first look."""
    candidacy = Candidacy("b")
    held, free = StoreView(record(1), 1, seconds_left=2.0), StoreView(None, 1)
    assert not candidacy.may_take(held, 0.0)
    assert not candidacy.may_take(free, 0.4)
    assert not candidacy.may_take(free, 0.4 + LONGEST_POLL_SECONDS - 0.01)
    assert candidacy.may_take(free, 0.4 + LONGEST_POLL_SECONDS)
    assert not candidacy.may_take(held, 1.0)
    assert candidacy.may_take(free, 3.0)


@given(st.floats(0, 20))
def test_the_end_of_a_lease_is_seen_at_once(left: float) -> None:
    """No look comes later after the end than the shortest pause, and none comes rarely."""
    seconds = StoreView(record(1), 1, left).looks_again_after
    assert POLL_SECONDS <= seconds <= LONGEST_POLL_SECONDS
    assert seconds <= max(left, POLL_SECONDS)


def test_the_lease_of_an_earlier_run_of_its_own_is_taken_at_once() -> None:
    """The supervisor never runs two schedulers, so that run is dead."""
    assert Candidacy("a").may_take(StoreView(record(3), 3), 0.0)


def test_a_store_that_has_lost_its_data_is_left_to_the_leader_for_a_while() -> None:
    """It may live, and comes back with its epoch; if not, the next one begins above it."""
    candidacy = Candidacy("b")
    assert not candidacy.may_take(StoreView(record(7), 7), 0.0)
    assert not candidacy.may_take(StoreView(None, 0), 1.0)
    assert not candidacy.may_take(StoreView(None, 0), 1.0 + RETURN_SECONDS / 2)
    assert candidacy.may_take(StoreView(None, 0), 1.0 + RETURN_SECONDS)
    assert candidacy.highest == 7


def test_the_wait_for_a_leader_begins_anew_after_it_was_back() -> None:
    """Each loss of data has its own time."""
    candidacy = Candidacy("b")
    for view, now in [(record(7), 0.0), (None, 1.0), (record(7), 2.0)]:
        assert not candidacy.may_take(StoreView(view, 0 if view is None else 7), now)
    assert not candidacy.may_take(StoreView(None, 0), 1.0 + RETURN_SECONDS)


def test_a_leader_whose_store_does_not_answer_goes_on() -> None:
    """It asks again, and says meanwhile that it gets no answer."""
    tenure = Tenure(record(2))
    tenure.answered(Renewal.UNREACHABLE)
    assert (tenure.unreachable, tenure.over, tenure.renews(1.5)) == (True, False, True)
    tenure.answered(Renewal.KEPT)
    assert not tenure.unreachable


@pytest.mark.parametrize("by", ["the store", "a front"])
def test_a_leader_is_over_once_another_has_led(by: str) -> None:
    """Whoever says so; it renews no more, and nothing makes it a leader again."""
    tenure = Tenure(record(2))
    if by == "the store":
        tenure.answered(Renewal.SUPERSEDED)
    else:
        tenure.heard(3)
    tenure.answered(Renewal.KEPT)
    assert tenure.over
    assert not tenure.renews(1.0)


def test_a_front_with_the_same_epoch_or_a_lower_one_changes_nothing() -> None:
    """Only a higher epoch is that of another leader."""
    tenure = Tenure(record(2))
    tenure.heard(2)
    tenure.heard(1)
    assert not tenure.over


def test_a_hand_over_that_nobody_answers_is_given_up() -> None:
    """Meanwhile the lease is not renewed, so that another replica can take it."""
    tenure = Tenure(record(2))
    tenure.hand_over(1.0)
    assert not tenure.renews(1.5)
    assert tenure.renews(1.0 + HAND_OVER_SECONDS)


def test_what_a_newer_router_adds_to_its_lease_is_ignored() -> None:
    """So that replicas of both versions know who leads."""
    assert LeaderRecord.decode(record(2).encoded() + " more") == record(2)


@pytest.mark.parametrize(("led", "takes"), [(UNSERVED_SECONDS - 1.0, False), (UNSERVED_SECONDS, True)])
def test_a_replica_leaves_the_lease_of_a_run_that_died_young(led: float, *, takes: bool) -> None:
    """One that dies before it serves would otherwise die again and again, with the lease."""
    held = replace(record(2), since=1000.0)
    candidacy = Candidacy(held.replica, 1000.0 + led)
    assert candidacy.may_take(StoreView(held, 2), 0.0) is takes
    assert candidacy.may_take(StoreView(None, 2), 1.0)


def test_a_lease_lasts_longer_for_a_while_after_a_renewal_that_came_late() -> None:
    """Four times as long as the latest renewal took to come, fifteen seconds at most, for a minute after it."""
    tenure = Tenure(record(2))
    assert [tenure.seconds_for(now) for now in (0.0, 0.5, 1.5)] == [LEASE_SECONDS] * 3
    assert [tenure.seconds_for(now) for now in (3.5, 4.0, 5.5)] == [8.0] * 3
    assert tenure.seconds_for(15.5) == LONGEST_LEASE_SECONDS
    assert {tenure.seconds_for(15.5 + second) for second in range(1, 61)} == {LONGEST_LEASE_SECONDS}
    assert tenure.seconds_for(16.0 + BUSY_SECONDS) == LEASE_SECONDS


def test_a_late_renewal_counts_for_a_minute_though_an_earlier_one_came_later() -> None:
    """The lease does not end early where the one that was later is forgotten."""
    tenure = Tenure(record(2))
    lasts = {now: tenure.seconds_for(now) for now in (0.0, 3.0, *range(4, 50), 51.5, *range(52, 112), 112.5)}
    assert {lasts[now] for now in (3.0, 51.5, 63)} == {12.0}
    assert {lasts[now] for now in (64, 111)} == {10.0}
    assert lasts[112.5] == 6.0


def test_the_time_of_a_hand_over_is_no_late_renewal() -> None:
    """One that nobody has answered leaves the lease as short as before."""
    tenure = Tenure(record(2))
    tenure.seconds_for(0.0)
    tenure.hand_over(0.5)
    assert tenure.seconds_for(0.5 + HAND_OVER_SECONDS) == LEASE_SECONDS
