"""One hostile address attacks beside polite clients: the short form of `python -m tests.attacks`, without its time
limits.
"""

import pytest

from tests.attacks.attacker import ATTACKS
from tests.attacks.run import run


@pytest.mark.parametrize("name", ATTACKS)
async def test_an_attack_takes_no_memory_and_no_call_from_others(name: str) -> None:
    """A router with 1 GiB stays below 600 MiB, serves every polite call, and holds nothing after the attack."""
    seen = await run(name, 2.0, sink=False)
    assert not seen.harm
