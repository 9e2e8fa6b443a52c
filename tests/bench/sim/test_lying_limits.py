"""A client's false max_tokens do not harm its neighbours: the window's predictions do not depend on what clients
claim.
"""

import pytest

from bench.sim.command import simulate
from bench.sim.scenario import Scenario, WorkerSpec
from bench.workloads.liars import Liars
from tests.core.scenario import Scene

LITTLE = 30_000
"""Size in tokens of a KV cache that the honest clients' calls fill."""


def honest_service(workload: Liars, kv_tokens: int | None) -> float:
    """Return the honest clients' service after the warm-up, in tokens as they see them; output counts double."""
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
    """Beside 8 calls that claim 128,000 tokens, others get at least 95 % of what they get beside honest ones.

    This holds for exact and for equal limits of the others, and for short answers as for streams that go on until the
    end.
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
    """A client that always cancels is expected to use as many tokens as it did, neither its max_tokens nor the others'
    mean.
    """
    scene = Scene("dlpm_home", workers=("w1",))
    call = scene.arrive("ada", "question", limit=1000)
    scene.start(call)
    scene.progress(call, 50)
    scene.cancel(call)
    assert scene.scheduler.estimates.outputs.lengths.remaining(scene.requests[call]) == 50
