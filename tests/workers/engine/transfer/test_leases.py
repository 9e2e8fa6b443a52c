"""KV under a lease: held until it is read, released or too old, and right as long as nobody has reused it."""

import pytest

from workers.engine.engine import default_config
from workers.engine.hardware import HARDWARE
from workers.engine.model import Request
from workers.engine.transfer.leases import Leases
from workers.engine.vllm_engine import VllmEngine

PROMPT = list(range(1, 41))


def prefilled(name: str = "a") -> tuple[VllmEngine, Leases]:
    """Return an engine of 24 blocks of 4 tokens that holds one prompt of 10 blocks since time 0."""
    engine = VllmEngine(default_config("vllm", kv_tokens=100, block_size=4), HARDWARE["instant"])
    leases = Leases(engine, 30.0)
    engine.submit(Request(name, PROMPT, 1, ignore_eos=True, hands_off=True))
    engine.step()
    assert engine.take_held() == [name]
    leases.begin(name, 0.0)
    return engine, leases


def overwrite(engine: VllmEngine) -> None:
    """Have all blocks that are free used for another prompt."""
    engine.submit(Request("other", list(range(1000, 1090)), 1, ignore_eos=True))
    while engine.has_work:
        engine.step()


def test_held_blocks_are_not_reused() -> None:
    """A prompt that does not fit beside them waits; it is computed as soon as they are released."""
    engine, leases = prefilled()
    assert engine.used_tokens == 40
    engine.submit(Request("big", list(range(1000, 1090)), 1, ignore_eos=True))
    assert engine.step() == (0.0, [])
    assert engine.stalled
    leases.release("a", 1.0)
    assert engine.step()[1]
    engine.check_integrity()


def test_a_read_in_time_is_right_and_releases() -> None:
    """Nothing is counted against it."""
    engine, leases = prefilled()
    assert leases.read("a", 29.9)
    assert (engine.used_tokens, engine.held) == (0, 0)
    assert (leases.expired, leases.late) == (0, 0)
    assert leases.next_end is None


@pytest.mark.parametrize("reused", [False, True])
def test_a_late_read_is_right_until_the_blocks_are_reused(reused: bool) -> None:
    """Whether or not, it is counted, and so is the end of the lease."""
    engine, leases = prefilled()
    leases.expire(30.0)
    assert engine.used_tokens == 0
    if reused:
        overwrite(engine)
    assert leases.read("a", 31.0) != reused
    assert (leases.expired, leases.late) == (1, 1)


def test_a_second_read_is_late_too() -> None:
    """The first has released the blocks."""
    engine, leases = prefilled()
    assert leases.read("a", 1.0)
    overwrite(engine)
    assert not leases.read("a", 2.0)
    assert (leases.expired, leases.late) == (0, 1)


def test_renewals_extend_the_lease_by_two_thirds() -> None:
    """An early one changes nothing; one that comes too late does not bring the hand-off back."""
    engine, leases = prefilled()
    leases.renew(["a"], 5.0)
    assert leases.next_end == 30.0
    leases.renew(["a", "unknown"], 25.0)
    assert leases.next_end == 45.0
    leases.renew(["a"], 45.0)
    assert (engine.held, leases.expired) == (0, 1)


def test_what_is_spoilt_reads_wrong() -> None:
    """As if its time were over and others had reused its blocks."""
    engine, leases = prefilled()
    leases.spoil("a")
    assert (engine.held, leases.expired) == (0, 1)
    assert not leases.read("a", 1.0)


def test_a_read_of_what_never_was_is_wrong() -> None:
    """It is counted as one that came too late."""
    _, leases = prefilled()
    assert not leases.read("never", 1.0)
    assert leases.late == 1
