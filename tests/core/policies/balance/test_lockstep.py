"""In front of ranks in lockstep, balance by tokens serves more than balance by requests."""

import pytest

from router.core.policies.balance.balance_parameters import Br0Parameters, BrhParameters
from tests.core.policies.balance.lockstep import Lockstep, long_contexts

CASES = [
    ("br0", Br0Parameters(), 0.4),
    ("br0", Br0Parameters(beta=0), 0.5),
    ("br0", Br0Parameters(threshold=10**6, candidates=16, subset=4), 0.6),
    ("brh", BrhParameters(predictor="none"), 0.4),
    ("brh", BrhParameters(predictor="survival"), 0.4),
    ("brh", BrhParameters(predictor="exact_match"), 0.4),
    ("brh", BrhParameters(predictor="oracle"), 0.4),
    ("dlpm_balance", None, 0.6),
]


def saturated(policy: str, parameters: object = None) -> Lockstep:
    """Serve four clients with long contexts for a while, always with more requests than places."""
    group = Lockstep(policy, *([] if parameters is None else [parameters]), ranks=4, places=4, token_seconds=1e-6)
    group.serve(long_contexts(1, 4), 60, 500)
    return group


@pytest.fixture(scope="module")
def by_requests() -> Lockstep:
    """The same before balance by requests."""
    return saturated("dlpm_home")


@pytest.mark.parametrize(("policy", "parameters", "most"), CASES)
def test_the_ranks_are_more_even_and_faster(
    policy: str, parameters: object, most: float, by_requests: Lockstep
) -> None:
    """The imbalance is a fraction of that of `dlpm_home`, and more tokens are served per second."""
    group = saturated(policy, parameters)
    assert group.imbalance < most * by_requests.imbalance
    assert group.throughput > 1.05 * by_requests.throughput
