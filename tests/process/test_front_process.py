"""What each of several fronts is allowed."""

import pytest

from router.config.settings import Settings
from router.front.byte_budget import ByteBudget
from router.process.front_process import share_of


@pytest.mark.parametrize("fronts", [1, 2, 8, 99])
def test_each_front_can_hold_the_longest_body(fronts: int) -> None:
    """However many fronts share the memory; together they hold no more than all, or than one such body each."""
    settings = Settings()
    share = share_of(settings, fronts)
    assert ByteBudget(share.max_held_bytes).has_room("ann", settings.body_limit)
    assert fronts * share.max_held_bytes <= settings.max_held_bytes + fronts * 3 * settings.body_limit
