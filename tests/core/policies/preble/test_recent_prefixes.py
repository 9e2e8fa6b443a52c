"""The prefixes of recent requests equal those counted from a list of the requests."""

from collections import deque
from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from router.core.model.request import WorkerId
from router.core.policies.preble.recent_prefixes import RecentPrefixes
from tests.core.scenario import key

W1, W2 = WorkerId("w1"), WorkerId("w2")
texts = st.text("xy", max_size=6)


class Listed:
    """Counts from a list of prompts in order of arrival, by worker."""

    def __init__(self) -> None:
        self.prompts: dict[WorkerId, deque[tuple[int, str]]] = {W1: deque(), W2: deque()}
        self._count = 0

    def add(self, text: str, worker: WorkerId) -> None:
        self._count += 1
        self.prompts[worker].append((self._count, text))

    def stalest(self, worker: WorkerId, chunks: int) -> list[int]:
        """Return the number of requests that share each chunk, from the least recently used and deepest chunk on."""
        used: dict[str, list[int]] = {}
        for number, text in self.prompts[worker]:
            for end in range(1, len(text) + 1):
                used.setdefault(text[:end], []).append(number)
        order = sorted(used, key=lambda prefix: (max(used[prefix]), -len(prefix)))
        return [len(used[prefix]) for prefix in order[:chunks]]


def stalest(prefixes: RecentPrefixes, worker: WorkerId, chunks: int) -> list[int]:
    """Return the answer of `RecentPrefixes`, chunk by chunk."""
    return [run.requests for run in prefixes.stalest(worker, chunks) for _ in range(run.chunks)]


@given(st.lists(st.tuples(st.sampled_from([W1, W2]), st.one_of(texts, st.none())), max_size=40), st.integers(0, 12))
def test_stalest_equals_the_list(steps: list[tuple[WorkerId, str | None]], chunks: int) -> None:
    """The answers are equal for any additions and removals of the oldest, and nothing is left of removed prompts."""
    prefixes, listed = RecentPrefixes(), Listed()
    for worker, text in steps:
        if text is not None:
            prefixes.add(key(text).hashes, worker)
            listed.add(text, worker)
        elif listed.prompts[worker]:
            _, gone = listed.prompts[worker].popleft()
            prefixes.remove(key(gone).hashes, worker)
        for each in (W1, W2):
            assert stalest(prefixes, each, chunks) == listed.stalest(each, chunks)
        live = {text for prompts in listed.prompts.values() for _, text in prompts if text}
        assert bool(live) <= len(prefixes) <= 2 * len(live)


def test_a_node_is_joined_again_when_shorter_prompts_end() -> None:
    """A prefix is one node again after prompts that end inside it have come and gone."""
    prefixes = RecentPrefixes()
    prefixes.add(key("document").hashes, W1)
    for worker in (W1, W2):
        for end in range(1, 8):
            prefixes.add(key("document"[:end]).hashes, worker)
        assert len(prefixes) == 8
        for end in range(1, 8):
            prefixes.remove(key("document"[:end]).hashes, worker)
        assert len(prefixes) == 1
        assert [*prefixes.stalest(W1, 99)] == [(8, 1)]


def test_a_small_request_looks_at_few_nodes() -> None:
    """The cost depends on the chunks requested, not on all chunks."""
    prefixes = RecentPrefixes()
    for number in range(1000):
        prefixes.add(key(f"document{number % 10}{number // 10 % 10}{number // 100}").hashes, W1)
    assert [*islice(prefixes.stalest(W1, 10**9), 2)] == [(1, 1), (1, 1)]
    assert [*prefixes.stalest(W1, 2)] == [(1, 1), (1, 1)]
