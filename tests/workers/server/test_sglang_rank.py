"""When the gauges of one SGLang rank are refreshed."""

import re

from workers.dialects.exposition import Exposition
from workers.dialects.sglang_rank import SglangRank
from workers.engine.barrier import Barrier
from workers.engine.engine import create_engine
from workers.engine.model import Request
from workers.engine.sglang_engine import SglangEngine
from workers.settings import WorkerSettings

SETTINGS = WorkerSettings(dialect="sglang", hardware="instant", ranks=2)


def hit_rate(rank: SglangRank) -> float:
    """Return the gauge, as it is exposed."""
    exposition = Exposition("sglang:")
    rank.add_metrics(exposition)
    (value,) = re.findall(rb"^sglang:cache_hit_rate{} (\S+)$", exposition.text(), re.MULTILINE)
    return float(value)


def test_a_rank_that_only_takes_part_keeps_its_gauges() -> None:
    """A dummy step is no step of the rank's scheduler, so what its last prefill has shown stays."""
    ranks = []
    for _ in range(SETTINGS.ranks):
        engine = create_engine(SETTINGS.engine_config(), SETTINGS.machine())
        assert isinstance(engine, SglangEngine)
        ranks.append(SglangRank(SETTINGS, engine, 4096, lambda: 0.0))
    group, prompt = Barrier([rank.engine for rank in ranks]), list(range(100))

    def step() -> None:
        assert group.step() is not None
        for rank in ranks:
            rank.after_step()

    for name in ("first", "again"):
        ranks[0].engine.submit(Request(name, prompt, 1, ignore_eos=True))
        step()
    found = hit_rate(ranks[0])
    assert found > 0.9
    ranks[1].engine.submit(Request("other", prompt, 5, ignore_eos=True))
    for _ in range(5):
        step()
        assert hit_rate(ranks[0]) == found
