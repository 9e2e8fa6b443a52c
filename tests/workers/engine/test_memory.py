"""What the emulated engines reserve and evict, by rules that were observed on the real engines."""

from workers.engine.caches.radix_cache import RadixCache
from workers.engine.engine import create_engine
from workers.engine.hardware import HARDWARE
from workers.engine.model import Dialect, EngineConfig, Request
from workers.engine.sglang_engine import SglangEngine
from workers.engine.vllm_engine import VllmEngine


def engine(dialect: Dialect, kv_tokens: int, page: int, batched: int = 64) -> VllmEngine | SglangEngine:
    return create_engine(EngineConfig(dialect, kv_tokens, page, 8, batched), HARDWARE["instant"])


def request(name: str, start: int, length: int, answer: int, *, ignore_eos: bool = True) -> Request:
    return Request(name, list(range(start, start + length)), answer, ignore_eos)


def test_the_rest_of_a_split_node_counts_as_used() -> None:
    """A prompt that shares the start of an old one protects the old one's end from eviction before a newer leaf."""
    cache = RadixCache(100, 2)
    cache.allocate(12)
    cache.insert([1, 2, 3, 4, 5, 6, 7, 8], 8)
    cache.insert([11, 12, 13, 14], 4)
    assert cache.match([1, 2, 3, 4, 9, 9], 6)[1] == 4
    cache.make_room(100 - 12 + 1)
    assert cache.peek([11, 12, 13, 14], 4) == 0
    assert cache.peek([1, 2, 3, 4, 5, 6, 7, 8], 8) == 8


def test_vllm_admits_a_request_only_where_its_whole_prompt_fits() -> None:
    """Memory for the part that the next step computes is not enough."""
    emulated = engine("vllm", kv_tokens=(1 + 20) * 4, page=4, batched=16)
    emulated.submit(request("holds half", 0, 38, 2))
    for _ in range(3):
        emulated.step()
    emulated.submit(request("long", 100, 44, 2))
    emulated.step()
    assert (emulated.running, emulated.waiting) == (0, 1)
    emulated.step()
    assert (emulated.running, emulated.waiting) == (1, 0)
    assert emulated.used_tokens == 16


def test_sglang_reserves_all_of_an_answer_that_cannot_end_early() -> None:
    """For an answer that may end early, SGLang reserves only a part of max_tokens."""
    for ignore_eos, running in ((True, 1), (False, 2)):
        emulated = engine("sglang", kv_tokens=95, page=1)
        emulated.submit(request("a", 0, 10, 45, ignore_eos=ignore_eos))
        emulated.step()
        emulated.submit(request("b", 100, 5, 40))
        emulated.step()
        assert emulated.running == running


def test_sglang_reserves_a_page_for_each_request() -> None:
    """Prompt, answer and one page must be fewer tokens than are neither held nor expected."""
    for answer, running in ((6, 2), (7, 1)):
        emulated = engine("sglang", kv_tokens=64, page=16)
        emulated.submit(request("a", 0, 16, 10))
        emulated.step()
        emulated.submit(request("b", 100, 16, answer))
        emulated.step()
        assert emulated.running == running


def test_sglang_evicts_a_page_ahead_of_need() -> None:
    """A decode step makes room for one more page per request, even if none needs it yet."""
    emulated = engine("sglang", kv_tokens=96, page=16)
    for name, start in (("old", 0), ("older", 100)):
        emulated.submit(request(name, start, 32, 1))
        emulated.step()
    emulated.submit(request("new", 200, 16, 3))
    emulated.step()
    emulated.step()
    assert emulated.counters.evicted_tokens == 0
    emulated.step()
    assert emulated.counters.evicted_tokens == 32
