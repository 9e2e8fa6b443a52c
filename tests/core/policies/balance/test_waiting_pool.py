"""The waiting requests, in order of arrival and by weight."""

from hypothesis import given
from hypothesis import strategies as st

from router.core.model.prompt_key import PromptKey
from router.core.model.request import ClientId, Request, RequestId
from router.core.policies.balance.waiting_pool import MANY, WaitingPool

MODELS = ("m", "n")


@given(
    steps=st.lists(st.tuples(st.sampled_from(MODELS), st.integers(0, 9), st.none() | st.integers(0, 99)), max_size=60),
    before=st.sampled_from([0, MANY + 9]),
    count=st.sampled_from([1, 3, MANY]),
)
def test_the_oldest_requests_are_kept_in_order_of_weight(
    steps: list[tuple[str, int, int | None]], before: int, count: int
) -> None:
    """However requests come and go, those by weight are the oldest of each route, sorted."""
    pool, waiting = WaitingPool(sorts_all=False), dict[RequestId, tuple[int, int, str]]()
    for number, (model, weight, removed) in enumerate([("m", 5, None)] * before + steps):
        request = Request(RequestId(f"r{number}"), ClientId("ada"), model, (PromptKey(b"", 1, weight),))
        pool.add(request, weight)
        waiting[request.id] = weight, number, model
        if removed is not None:
            gone = [*waiting][removed % len(waiting)]
            assert pool.remove(gone).id == gone
            del waiting[gone]
        for models in (MODELS[:1], MODELS):
            oldest = [(weight, number) for weight, number, model in waiting.values() if model in models][:count]
            found = pool.first_by_weight(models, count)
            assert [(each.weight, each.arrival - 1) for each in found] == sorted(oldest)
