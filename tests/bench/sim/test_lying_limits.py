"""A client's false max_tokens do not harm its neighbours: the window's predictions do not depend on what clients
claim.
"""

import pytest

from bench.sim.command import simulate
from bench.sim.scenario import Scenario, WorkerSpec
from bench.workloads.liars import Liars
from tests.core.scenario import Scene

LITTLE = 30_000
"""Tokens of a KV cache that is filled by what the honest clients ask."""


def honest_service(workload: Liars, kv_tokens: int | None) -> float:
    """Return the honest clients' service after the first seconds, in tokens as they see them; output counts double."""
    result = simulate(
        Scenario("dlpm_home", workload, (WorkerSpec(kv_tokens=kv_tokens),) * 2, seconds=40.0, warmup=10.0, seed=1)
    )
    first, last = (
        sum(got for client, got in sample.client_service.items() if client != "liar")
        for sample in (next(s for s in result.timeline if s.time >= result.warmup), result.timeline[-1])
    )
    return last - first


@pytest.mark.parametrize("kv_tokens", [LITTLE, None])
@pytest.mark.parametrize("limit", [None, 4096])
@pytest.mark.parametrize("answer", [2_000, 20_000])
def test_limits_beyond_all_answers_cost_others_nothing(kv_tokens: int | None, limit: int | None, answer: int) -> None:
    """With 8 calls that state 128,000, others are served within 5 % of what they are if these state what they get.

    Whether others' limits are exact or the same for all, and whether the calls end soon or stream for as long as
    anybody looks.
    """
    served = {
        lie: honest_service(
            Liars(honest=3, in_flight=32, limit=limit, lying=8, lying_from=5.0, lie=lie, liar_output=answer), kv_tokens
        )
        for lie in (None, 128_000)
    }
    assert served[128_000] >= 0.95 * served[None], served
    assert served[None] > 30 * 1000, served


def test_cancelled_streams_inform_the_length_estimates() -> None:
    """Otherwise a client that always cancels would be expected to use all of its max_tokens, or as much as others."""
    talk = Scene("dlpm_home", workers=("w1",))
    call = talk.arrive("ada", "question", limit=1000)
    talk.start(call)
    talk.progress(call, 50)
    talk.cancel(call)
    assert talk.scheduler.estimates.output_lengths.forecast(talk.requests[call]) == 50
