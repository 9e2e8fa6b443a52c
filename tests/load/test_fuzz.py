"""A thousand random inputs for each reader; `python -m tests.fuzz` runs any number of them."""

from random import Random

import pytest

from tests.fuzz.engine import Failure, Target, fuzz
from tests.fuzz.targets import TARGETS

INPUTS = 1000


@pytest.mark.parametrize("name", TARGETS)
def test_no_input_makes_a_reader_crash_hang_or_grow(name: str) -> None:
    """Each reader accepts some inputs and rejects others; otherwise only the seeds or only the noise would be read."""
    result = fuzz(TARGETS[name], INPUTS, seed=1, watch_every=20)
    assert result.accepted > 0
    assert result.accepted < INPUTS or name == "report"


def make(random: Random) -> bytes:
    return random.randbytes(10)


def crash(data: bytes, random: Random) -> bool:  # noqa: ARG001 - a target's
    return bool(1 / (data[0] % 50))


def hang(data: bytes, random: Random) -> bool:  # noqa: ARG001 - a target's
    while data[0] % 50 == 0:
        data = bytes(10)
    return True


def grow(data: bytes, random: Random, kept: list[bytes] = []) -> bool:  # noqa: ARG001, B006 - it shall leak
    kept.append(data * 10)
    return True


@pytest.mark.parametrize(("run", "why"), [(crash, "division by zero"), (hang, "steps"), (grow, "bytes are left")])
def test_what_crashes_hangs_or_grows_is_found(run: object, why: str) -> None:
    """A finding carries the number of its input, so that it can be reproduced."""
    with pytest.raises(Failure, match=why):
        fuzz(Target("x", make, run), 10_000, watch_every=1)  # type: ignore[arg-type]


def test_an_input_is_made_from_the_seed_and_its_number_alone() -> None:
    """An input can be reproduced without the inputs before it."""
    for target in (TARGETS["stream"], TARGETS["state"]):
        made: dict[int, bytes] = {}

        def note(data: bytes, random: Random, made: dict[int, bytes] = made) -> bool:  # noqa: ARG001 - a target's
            made[len(made)] = data
            return True

        fuzz(target._replace(run=note), 5, seed=3)
        fuzz(target._replace(run=note), 1, seed=3, first=4)
        assert made[5] == made[4]
