"""A hung worker accepts connections but sends nothing; it gets no requests until it shows a sign of life."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.fleet.health import Condition, HealthRules
from router.core.fleet.service_rate import FIRST_SECONDS_PER_TOKEN
from router.core.fleet.window import FixedWindow
from router.core.fleet.worker_state import SILENCE_PREFILLS
from router.core.model.commands import Dispatch
from router.core.model.events import (
    Event,
    Failed,
    Fault,
    Progressed,
    Returned,
    Started,
    WorkerAnswered,
    WorkerJoined,
    WorkerReported,
)
from router.core.model.request import RequestId, Worker, WorkerId
from router.core.scheduler_settings import SchedulerSettings
from tests.core.scenario import MODEL, Scene
from tests.support.running import chat, running_router, until
from tests.support.scripted_engine import scripted_engine

W1, W2 = WorkerId("w1"), WorkerId("w2")
LIMIT = 4.0


def scene(
    *workers: str, policy: str = "rr+fcfs", requests: int = 9, failures: int = 2, silence: float = LIMIT
) -> Scene:
    """A scheduler before these workers, each with room for this many requests."""
    rules = HealthRules(failures=failures, cooldown=10.0, silence=silence)
    return Scene(policy, workers=workers, settings=SchedulerSettings(window=FixedWindow(requests, 10**6), health=rules))


def send_to(talk: Scene, worker: WorkerId) -> RequestId:
    """Requests until one goes there; the others are answered."""
    while talk.worker_of(request := talk.arrive("ada", "a")) != worker:
        talk.serve(request)
    return request


def says_only_w2(talk: Scene, seconds: float) -> None:
    """So much time passes, in which the second worker answers its polls."""
    for _ in range(round(seconds / 0.5)):
        talk.wait(0.5)
        talk.feed(WorkerAnswered(W2))


def where_six_go(talk: Scene) -> set[WorkerId]:
    """The workers that the next requests are sent to."""
    sent = [talk.arrive("ada", letter) for letter in "bcdefg"]
    return {talk.worker_of(request) for request in sent if request in talk.dispatched}


@pytest.mark.parametrize("policy", ["rr+fcfs", "d2lpm", "dlpm_home", "least_requests+fcfs", "preble", "rr+vtc"])
def test_a_silent_worker_is_sent_no_requests(policy: str) -> None:
    """From the end of the time for which it may; before that it does."""
    talk = scene("w1", "w2", policy=policy)
    send_to(talk, W1)
    says_only_w2(talk, LIMIT - 0.5)
    assert not talk.scheduler.cluster[W1].silent
    says_only_w2(talk, 0.5)
    assert talk.scheduler.cluster[W1].silent
    assert where_six_go(talk) == {W2}


@pytest.mark.parametrize(
    "sign",
    [
        Started,
        lambda request: Progressed({request: 1}),
        lambda request: Failed(request, accepted=True, fault=Fault.ERROR),
        lambda request: Returned(request, accepted=False, fault=Fault.FULL),
        lambda _: WorkerAnswered(W1),
        lambda _: WorkerReported(W1, 1, 0),
        lambda _: WorkerJoined(Worker(W1, frozenset([MODEL]))),
    ],
    ids=["first token", "more tokens", "its error", "it is full", "a poll", "a report", "its models"],
)
def test_a_silent_worker_is_readmitted_at_its_first_sign_of_life(sign: Callable[[RequestId], Event]) -> None:
    """Without a probe: what hung was not broken."""
    talk = scene("w1", "w2")
    request = send_to(talk, W1)
    says_only_w2(talk, LIMIT)
    assert set(talk.scheduler.cluster.ejected) == {W1}
    talk.feed(sign(request))
    assert not talk.scheduler.cluster.ejected
    talk.wait(1.0)
    sent = [talk.arrive("ada", letter) for letter in "bcdefg"]
    assert [talk.worker_of(request) for request in sent].count(W1) == 3


def test_the_end_of_a_call_is_a_sign_of_life() -> None:
    """Of a whole answer it is the first one."""
    talk = scene("w1", "w2")
    request = send_to(talk, W1)
    says_only_w2(talk, LIMIT)
    talk.finish(request, 3)
    assert where_six_go(talk) == {W1, W2}


def test_any_sign_of_life_counts() -> None:
    """While a worker answers polls, or one of its streams goes on, no other call makes it silent."""
    talk = scene("w1")
    stream = talk.arrive("ada", "a")
    talk.arrive("bob", "b")
    for output in range(20):
        talk.wait(LIMIT - 0.1)
        talk.progress(stream, output + 1)
        assert not talk.scheduler.cluster[W1].silent
    for _ in range(20):
        talk.wait(LIMIT - 0.1)
        talk.feed(WorkerReported(W1, 2, 0))
        assert not talk.scheduler.cluster[W1].silent


def test_a_failure_without_an_answer_is_not_a_sign_of_life() -> None:
    """A connection that is given up, or reset by a kernel, says nothing of the process behind it."""
    talk = scene("w1", "w2", failures=0)
    request = send_to(talk, W1)
    says_only_w2(talk, LIMIT)
    talk.feed(Returned(request, accepted=True, fault=Fault.BROKEN))
    assert talk.worker_of(request) == W2
    assert where_six_go(talk) == {W2}, "although nothing runs there any more"


def test_an_idle_worker_is_not_silent() -> None:
    """Nothing is due from it; the time begins with the first thing that is sent there."""
    talk = scene("w1", "w2")
    talk.wait(100.0)
    request = send_to(talk, W1)
    says_only_w2(talk, LIMIT - 0.5)
    assert not talk.scheduler.cluster[W1].silent
    talk.serve(request)
    talk.wait(100.0)
    assert where_six_go(talk) == {W1, W2}


def test_the_queue_of_a_silent_worker_is_reassigned() -> None:
    """Its queue is reassigned, and is sent as the others have room."""
    talk = scene("w1", "w2", requests=1)
    first, second, third, fourth = [talk.arrive("ada", letter) for letter in "abcd"]
    assert talk.worker_of(first) == W1
    talk.serve(second)
    talk.serve(fourth)
    assert third not in talk.dispatched, "it waits for the first worker"
    says_only_w2(talk, LIMIT)
    assert talk.worker_of(third) == W2


def test_the_only_worker_keeps_its_queue() -> None:
    """No request is refused, and the whole queue is dispatched once the worker answers again."""
    talk = scene("w1")
    first = talk.arrive("ada", "a")
    talk.wait(LIMIT)
    others = [talk.arrive("ada", letter) for letter in "bc"]
    assert list(talk.dispatched) == [first]
    assert not talk.refusals
    talk.start(first)
    assert list(talk.dispatched) == [first, *others]


def test_when_all_are_silent_the_first_to_speak_takes_what_waits() -> None:
    """Whoever of them it waited for."""
    for speaker in ("w1", "w2"):
        talk = scene("w1", "w2", requests=1)
        for letter in "ab":
            talk.arrive("ada", letter)
        waiting = [talk.arrive("ada", letter) for letter in "cd"]
        talk.wait(LIMIT)
        assert len(talk.dispatched) == 2
        for request in waiting:
            assert request not in talk.dispatched
        first = next(r for r in talk.order if talk.worker_of(r) == speaker)
        talk.serve(first)
        for _ in range(2):
            (last,) = talk.order[-1:]
            assert last in waiting
            assert talk.worker_of(last) == speaker
            waiting.remove(last)
            talk.serve(last)
        assert not waiting


def test_the_last_worker_of_a_model_keeps_its_queue() -> None:
    """The other one leaves: requests wait and are not refused, as there is a worker."""
    talk = scene("w1", "w2")
    first = send_to(talk, W1)
    says_only_w2(talk, LIMIT)
    talk.leave("w2")
    waiting = talk.arrive("ada", "z")
    assert waiting not in talk.dispatched
    assert not talk.refusals
    talk.start(first)
    assert talk.worker_of(waiting) == W1


def test_the_breaker_opens_independently_of_silence() -> None:
    """Its calls time out: when it speaks, it is still left out for the cooldown, and then probed."""
    talk = scene("w1", "w2")
    there = [send_to(talk, W1) for _ in range(3)]
    says_only_w2(talk, LIMIT)
    for request in there[:2]:
        talk.feed(Returned(request, accepted=True, fault=Fault.BROKEN))
    for request in there[:2]:
        talk.serve(request)
    talk.feed(WorkerAnswered(W1))
    assert set(talk.scheduler.cluster.ejected) == {W1}
    talk.wait(10.0)
    assert set(talk.scheduler.cluster.ejected) == {W1}, "by then it is silent again"
    talk.feed(WorkerAnswered(W1))
    assert not talk.scheduler.cluster.ejected
    assert talk.scheduler.cluster[W1].health.condition is Condition.HALF_OPEN


def test_an_open_breaker_does_not_close_while_the_worker_is_silent() -> None:
    """Its time is over, and it has said nothing: it is not tried before it does."""
    talk = scene("w1", "w2")
    there = [send_to(talk, W1) for _ in range(3)]
    for request in there[:2]:
        talk.feed(Returned(request, accepted=True, fault=Fault.BROKEN))
    says_only_w2(talk, 20.0)
    assert talk.scheduler.cluster[W1].health.condition is Condition.OPEN
    assert where_six_go(talk) == {W2}
    talk.start(there[2])
    assert talk.scheduler.cluster[W1].health.condition is Condition.HALF_OPEN


def test_a_long_prefill_does_not_count_as_silence() -> None:
    """An engine that answers nothing while it computes is left the time that this should take, and some more."""
    talk = scene("w1", "w2")
    prompt = "a" * 4000
    request = talk.arrive("ada", prompt)
    assert talk.worker_of(request) == W1
    due = SILENCE_PREFILLS * 32 * len(prompt) * FIRST_SECONDS_PER_TOKEN
    assert due > 5 * LIMIT
    says_only_w2(talk, due - 1.0)
    assert not talk.scheduler.cluster[W1].silent
    says_only_w2(talk, 2.0)
    assert talk.scheduler.cluster[W1].silent


def test_a_slow_engine_is_judged_by_its_own_speed() -> None:
    """One that was seen to need 10 ms per token may say nothing for longer over the same prompt."""
    talk = scene("w1")
    for letter in "abc":
        request = talk.arrive("ada", 10 * letter)
        talk.wait(3.2)
        talk.serve(request)
    talk.arrive("ada", 20 * "d")
    talk.wait(LIMIT + 6.4)
    assert not talk.scheduler.cluster[W1].silent
    talk.wait(SILENCE_PREFILLS * 6.4)
    assert talk.scheduler.cluster[W1].silent


def test_the_silence_timeout_can_be_switched_off() -> None:
    """With 0, a worker may say nothing for ever."""
    talk = scene("w1", "w2", silence=0.0)
    send_to(talk, W1)
    says_only_w2(talk, 500.0)
    assert where_six_go(talk) == {W1, W2}


def test_no_alarm_rings_for_one_that_is_silent() -> None:
    """That it is still silent is no reason to look again, or the timer would never rest."""
    talk = scene("w1", "w2")
    send_to(talk, W1)
    says_only_w2(talk, LIMIT)
    assert talk.wake_at is None


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["arrive", "wait", "start", "progress", "finish", "give back", "cancel", "answer", "leave", "join"]
        ),
        st.integers(0, 7),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(STEPS, st.sampled_from(["rr+fcfs", "d2lpm", "dlpm_home"]))
def test_no_request_is_sent_to_a_silent_worker(steps: list[tuple[str, int]], policy: str) -> None:
    """Whatever happens: by a reckoning of its own of who said what when. And when all speak, all that waits goes."""
    talk = scene("w1", "w2", "w3", policy=policy, requests=3)
    run = Reckoning(talk)
    for kind, number in steps:
        run.step(kind, number)
    run.let_all_speak()
    assert not talk.scheduler.waiting or not list(talk.scheduler.cluster)


class Reckoning:
    """Plays steps, and knows of each worker when it was heard last, or got something to do after that."""

    def __init__(self, talk: Scene) -> None:
        self.talk = talk
        self.quiet_since = dict.fromkeys(["w1", "w2", "w3"], 0.0)
        self.silent: set[str] = set()

    def step(self, kind: str, number: int) -> None:
        """Let one thing happen, and check all that was sent."""
        running = self.running()
        worker = f"w{number % 3 + 1}"
        if kind == "arrive":
            self.tell(lambda: self.talk.arrive(f"client{number % 3}", "abcdefgh"[number]))
        elif kind == "wait":
            self.talk.now += number / 2
            self.note_time()
            self.tell(lambda: self.talk.wait(0.0))
        elif kind == "answer":
            self.heard(worker)
            self.tell(lambda: self.talk.feed(WorkerAnswered(WorkerId(worker))))
        elif kind == "join":
            self.heard(worker)
            self.tell(lambda: self.talk.join(worker))
        elif kind == "leave":
            self.tell(lambda: self.talk.leave(worker))
        elif running:
            self.of_a_call(kind, running[number % len(running)])

    def of_a_call(self, kind: str, request: RequestId) -> None:
        """One that is in flight."""
        if kind not in ("give back", "cancel"):
            self.heard(self.talk.worker_of(request))
        acts: dict[str, Callable[[], object]] = {
            "start": lambda: self.talk.start(request),
            "progress": lambda: self.talk.progress(request, 5),
            "finish": lambda: self.talk.finish(request, 5),
            "give back": lambda: self.talk.feed(Returned(request, accepted=True, fault=Fault.BROKEN)),
            "cancel": lambda: self.talk.cancel(request),
        }
        self.tell(acts[kind])

    def let_all_speak(self) -> None:
        """Answers of every worker, and an end of all that runs, until nothing does."""
        for worker in ("w1", "w2", "w3"):
            self.step("join", int(worker[1]) - 1)
        self.talk.wait(200.0)
        for worker in ("w1", "w2", "w3"):
            self.talk.feed(WorkerAnswered(WorkerId(worker)))
        self.talk.serve_all()

    def running(self) -> list[RequestId]:
        return list(self.talk.scheduler.attempts)

    def heard(self, worker: str) -> None:
        self.silent.discard(worker)
        self.quiet_since[worker] = self.talk.now

    def note_time(self) -> None:
        """Who has been silent for too long by now."""
        for state in self.talk.scheduler.cluster:
            if state.running and self.talk.now - self.quiet_since[state.worker.id] >= LIMIT:
                self.silent.add(state.worker.id)

    def tell(self, act: Callable[[], object]) -> None:
        """Do it; nothing is sent to one that is silent."""
        sent: list[Dispatch] = []
        before = {state.worker.id for state in self.talk.scheduler.cluster if state.running}
        known = dict(self.talk.dispatched)
        act()
        sent = [dispatch for dispatch in self.talk.dispatched.values() if known.get(dispatch.request) is not dispatch]
        for dispatch in sent:
            assert dispatch.worker not in self.silent
            if dispatch.worker not in before:
                before.add(dispatch.worker)
                self.quiet_since[dispatch.worker] = self.talk.now


# On real sockets


async def test_a_hung_worker_is_skipped() -> None:
    """It takes connections and answers neither calls nor polls; when it goes on with the call, it is back."""
    async with (
        scripted_engine() as one,
        scripted_engine() as two,
        running_router(one.url, two.url, policy="rr+fcfs", silence_timeout=0.3) as router,
        router.post(chat(stream=True)) as hanging,
    ):
        call = await one.call()
        one.ignores_polls = True
        state = router.scheduler.cluster[WorkerId(one.url.removeprefix("http://"))]
        await until(lambda: state.silent)
        reported = await router.get_json("/fairness")
        assert reported["workers"][state.worker.id]["breaker"] == "silent"
        for _ in range(4):
            async with router.post(chat()) as post:
                await (await two.call()).answer()
                assert b"yes" in await post.read()
        one.ignores_polls = False
        await call.answer("at last")
        assert b"at last" in await hanging.read()
        assert not state.silent
        async with router.post(chat()) as post, router.post(chat()) as other:
            await (await one.call()).answer()
            await (await two.call()).answer()
            await post.read()
            await other.read()
