"""The plan of a process: all settings reach it, secrets too, and nothing else is taken for a plan."""

from pathlib import Path

import pytest

from router.config.settings import Settings
from router.errors import ConfigError
from router.process.front_process import share_of
from router.process.plan import ProcessPlan, decode_plan

NAMED_BY_ADDRESS = ({"url": "http://c", "rank": 0, "group": "moe"}, {"url": "http://[::1]:1", "kv_topic": "kv"})
"""Workers whose own ids could not be given to others: @0, and brackets."""
SETTINGS = Settings.model_validate(
    {
        "worker": [
            "http://a:1",
            {"url": "https://b", "api_key": "of-b", "kv_events": "tcp://b:5557"},
            *NAMED_BY_ADDRESS,
        ],
        "worker_api_key": "of-workers",
        "admin_key": "operator-key-0123456789",
        "hash_secret": "a secret of the hashes",
        "state": "/some/folder",
        "alias": ["name=model"],
        "identity": ["key", "header"],
        "clients": "clients.yaml",
        "processes": "auto",
        "dlpm": {"quantum": 5000},
        "max_connections": 101,
    }
)


def test_a_plan_survives_its_way() -> None:
    """Every setting is the same there, also those that are masked elsewhere."""
    plan = ProcessPlan(SETTINGS, "/folder", 2, 3, (7, 8), 1, (1, 3))
    line = plan.encoded()
    assert line.count(b"\n") == 1
    assert decode_plan(line) == plan
    assert decode_plan(ProcessPlan(Settings(), "/folder").encoded()).settings == Settings()


@pytest.mark.parametrize("line", [b"", b"\n", b"[]\n", b"{}\n", b'{"settings": {"port": "x"}}\n'])
def test_other_input_is_no_plan(line: bytes) -> None:
    """A process that somebody else starts says which option it is for, instead of a traceback."""
    with pytest.raises(ConfigError, match="--processes"):
        decode_plan(line)


def test_fronts_share_what_is_limited_where_sockets_are() -> None:
    """Rounded up, so that no limit becomes zero; no limit stays none."""
    share = share_of(SETTINGS, 3)
    assert (share.max_connections, share.max_connections_per_address) == (34, 0)
    assert 3 * share.max_held_bytes >= SETTINGS.max_held_bytes
    assert share.state == Path("/some/folder")
