"""The scheduler that is built from settings."""

from router.config.settings import Settings
from router.core.clients.usage_days import MOST_UNNAMED, OTHERS
from router.core.model.request import ClientId
from router.core.model.saved import DailyUsage
from router.process.scheduling import new_scheduler

DAY = 20_000


def test_usage_is_kept_as_the_settings_say() -> None:
    """So many days are kept, and only clients that the clients file could name never lose their rows."""
    usage = new_scheduler(Settings(usage_days=2)).ledger.usage
    for client in ("alice", "user-mallory"):
        usage.add(DailyUsage(DAY, ClientId(client), "m", 1))
    for number in range(MOST_UNNAMED):
        usage.add(DailyUsage(DAY, ClientId(f"address-{number}"), "m", 1))
    ((_, rows),) = usage.days()
    clients = {row.client for row in rows}
    assert {"alice", OTHERS} <= clients
    assert "user-mallory" not in clients
    usage.begin_day(DAY + 1)
    assert list(usage.days())
    usage.begin_day(DAY + 2)
    assert not list(usage.days())
