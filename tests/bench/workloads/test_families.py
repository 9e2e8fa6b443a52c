"""The families of programs: which calls follow which, and what their prompts share."""

from collections import Counter
from itertools import pairwise

import pytest

from bench.sim.command import simulate
from bench.sim.scenario import Scenario, WorkerSpec
from bench.workloads.chat import Chat
from bench.workloads.embodied import Embodied
from bench.workloads.judge import Judge
from bench.workloads.parts.lengths import Lengths
from bench.workloads.parts.traffic import Call, Outcome
from bench.workloads.shared_prefix import SharedPrefix
from bench.workloads.tree_of_thoughts import STAGES, TreeOfThoughts
from router.core.model.events import Arrived
from tests.bench.sim.simulated import EventLog
from tests.core.played import played


def shared(one: Call, other: Call) -> int:
    """Return the number of leading tokens that two prompts share."""
    pairs = zip(one.prompt.tokens, other.prompt.tokens, strict=False)
    return next((length for length, (a, b) in enumerate(pairs) if a != b), min(len(one.prompt), len(other.prompt)))


@pytest.mark.parametrize(("branches", "calls"), [(2, 30), (3, 120), (4, 340)])
def test_a_tree_has_a_call_for_each_branch_of_each_thought(branches: int, calls: int) -> None:
    """A program has b + b² + b³ + b⁴ calls, and each level begins once the level above is answered."""
    (client,) = TreeOfThoughts(branches=branches, client_count=1, rate=0.1, sessions=1).clients(1)
    made = played(client, 1000)
    begin = made[0][0]
    assert len(made) == calls == made[0][1].program_calls
    assert {call.program for _, call in made} == {"1"}
    assert Counter(round(at - begin) for at, _ in made) == {stage: branches ** (stage + 1) for stage in range(STAGES)}
    for _, call in made:
        assert call.output_tokens <= 256 == call.output_limit


def test_a_thought_extends_the_one_above_it() -> None:
    """A prompt is the prompt above it, one of its answers and an instruction, and siblings differ in their samples."""
    workload = TreeOfThoughts(branches=2, client_count=1, rate=0.1, sessions=1)
    calls = [call for _, call in played(workload.clients(1)[0], 1000)]
    for number, call in enumerate(calls):
        if number < 2:
            assert call.prompt.tokens == calls[0].prompt.tokens
            continue
        parent = calls[number // 2 - 1]
        answer = tuple(range(parent.sample, parent.sample + parent.output_tokens))
        assert call.prompt.tokens[: -workload.instruction] == parent.prompt.tokens + answer
    assert len({call.sample for call in calls}) == len(calls)


def test_the_tree_does_not_depend_on_the_order_of_answers() -> None:
    """Each thought's length is drawn with the tree, so that policies are compared on the same trees."""
    workload = TreeOfThoughts(branches=2, client_count=1, rate=0.1, sessions=2)
    trees = [
        {(call.program, call.sample): (len(call.prompt), call.output_tokens) for _, call in made}
        for made in (
            played(workload.clients(1)[0], 60),
            played(workload.clients(1)[0], 60, seconds=lambda call: 100 / call.sample),
        )
    ]
    assert len(trees[0]) == 60
    assert trees[0] == trees[1]


def test_a_closed_loop_keeps_a_constant_number_of_trees_open() -> None:
    """The next tree begins when every branch of one has ended, and never more of them grow at a time."""
    (client,) = TreeOfThoughts(branches=2, client_count=1, concurrency=2, sessions=5).clients(1)
    made = played(client, 1000, seconds=lambda call: call.sample)
    spans = {
        name: (min(at for at, _ in calls), max(at + call.sample for at, call in calls))
        for name in map(str, range(1, 6))
        for calls in [[(at, call) for at, call in made if call.program == name]]
    }
    assert len(made) == 150
    begins, ends = sorted(begin for begin, _ in spans.values()), sorted(end for _, end in spans.values())
    assert begins == [0.0, 0.0, *ends[:3]]


def test_siblings_are_answered_differently() -> None:
    """Equal prompts get different answers, so that the prompts below them differ."""
    event_log = EventLog()
    workload = TreeOfThoughts(client_count=1, rate=1.0, sessions=1, output=Lengths(100))
    simulate(Scenario("d2lpm", workload, seconds=60.0), [event_log])
    keys = [event.request.prompts[0].hashes for _, event in event_log.events if isinstance(event, Arrived)]
    assert [len(set(level)) for level in (keys[:2], keys[2:6], keys[6:14], keys[14:])] == [1, 2, 4, 8]


def test_a_branch_ends_where_a_call_is_not_answered() -> None:
    """A failed call has no calls below it, and its siblings continue."""
    (client,) = TreeOfThoughts(client_count=1, rate=0.1, sessions=1).clients(1)
    made = played(client, 1000, lambda call: Outcome.FAILED if call.sample == 1 else Outcome.DONE)
    assert len(made) == 30 - (2 + 4 + 8)


def test_longer_questions_lengthen_every_prompt_of_the_tree() -> None:
    """A question ten times as long (S2) lengthens every prompt by as much and changes nothing else."""
    plain, long = (
        [call for _, call in played(TreeOfThoughts(client_count=1, rate=0.1, question_times=times).clients(1)[0], 30)]
        for times in (1.0, 10.0)
    )
    question = len(plain[0].prompt) - 70
    assert [len(call.prompt) for call in long] == [len(call.prompt) + 9 * question for call in plain]
    assert [call.output_tokens for call in long] == [call.output_tokens for call in plain]


@pytest.mark.parametrize("dimensions", [2, 16])
def test_a_score_joins_all_judgements(dimensions: int) -> None:
    """One call for each dimension is made at once, and then one that holds the article and every judgement."""
    (client,) = Judge(dimensions=dimensions, client_count=1, rate=0.1, sessions=1).clients(1)
    made = played(client, 100)
    *judgements, score = [call for _, call in made]
    assert len(judgements) == dimensions == score.program_calls - 1
    assert {round(at - made[0][0]) for at, _ in made[:-1]} == {0}
    article = len(judgements[0].prompt) - 75
    assert {shared(judgements[0], other) for other in (*judgements[1:], score)} == {article}
    assert len(score.prompt) == article + dimensions * 256 + 75
    assert (score.output_tokens, score.program) == (2, judgements[0].program)


def test_there_is_no_score_without_every_judgement() -> None:
    """If a judgement fails, the program makes no scoring call."""
    (client,) = Judge(dimensions=3, client_count=1, rate=0.1, sessions=1).clients(1)
    fates = iter([Outcome.DONE, Outcome.FAILED, Outcome.DONE])
    assert len(played(client, 100, lambda _: next(fates))) == 3


def test_the_text_before_an_article_is_the_same_each_time() -> None:
    """The extra tokens (S2) are shared by all articles of a client, and not with other clients."""
    one, other = Judge(client_count=2, rate=1.0, extra=600).clients(1)
    calls = [call for _, call in played(one, 100)]
    first, second, third = (next(call for call in calls if call.program == name) for name in ("1", "2", "3"))
    assert shared(first, second) == shared(second, third) == 660
    assert shared(first, played(other, 1)[0][1]) == 60


def test_steps_follow_each_other() -> None:
    """An agent's step holds all before it and begins a gap after the last answer; tasks share nothing."""
    (client,) = Embodied(client_count=1, rate=0.01, gap=0.03).clients(1)
    made = played(client, 200)
    tasks = {name: [(at, call) for at, call in made if call.program == name] for name in ("1", "2")}
    for steps in tasks.values():
        assert len(steps) == steps[0][1].program_calls > 20
        for (at, call), (later, following) in pairwise(steps):
            assert later == pytest.approx(at + 1.03)
            assert shared(call, following) == len(call.prompt)
            assert len(following.prompt) == len(call.prompt) + call.output_tokens + 7
    assert shared(tasks["1"][0][1], tasks["2"][0][1]) == 0


def test_a_conversation_has_its_turns() -> None:
    """A conversation has its number of turns, each continues the one before it, and none belongs to a program."""
    (client,) = Chat(client_count=1, rate=0.001, turns=Lengths(4), sessions=2, systems=1, system=50).clients(1)
    made = [call for _, call in played(client, 100)]
    assert len(made) == 8
    assert {call.program for call in made} == {None}
    assert [shared(one, other) >= len(one.prompt) for one, other in pairwise(made)].count(True) == 6


def test_a_conversation_does_not_depend_on_the_order_of_answers() -> None:
    """A conversation's questions and lengths are its own, however fast the workers are."""
    quick, slow = (
        simulate(Scenario("rr+fcfs", Chat(client_count=2, rate=1.0, reading=0.5), (WorkerSpec(speed=speed),), 20.0))
        for speed in (1.0, 0.2)
    )
    firsts = [
        [(r.client, r.arrived, r.input_tokens) for r in result.records if r.input_tokens < 1160]
        for result in (quick, slow)
    ]
    assert len(firsts[1]) > 10
    assert firsts[0] == firsts[1]


def test_longer_prefixes_lengthen_the_groups_alone() -> None:
    """A prefix twice as long (S2) lengthens every prompt by as much, and the questions stay the same."""
    plain, long = (
        [call for _, call in played(workload.clients(1)[0], 20)]
        for workload in (
            SharedPrefix(client_count=1, rate=1.0, system=30, prefix=Lengths(100), prefix_times=times)
            for times in (1.0, 2.0)
        )
    )
    assert [len(call.prompt) for call in long] == [len(call.prompt) + 100 for call in plain]


def test_groups_share_their_prefix() -> None:
    """Calls of a group share system and prefix, calls of other groups the system, and calls without a group only
    that.
    """
    workload = SharedPrefix(client_count=1, rate=1.0, groups=2, system=30, prefix=Lengths(100), question=Lengths(20))
    calls = [call for _, call in played(workload.clients(1)[0], 20)]
    assert {shared(calls[0], other) for other in calls[1:]} == {30, 130}
    assert {len(call.prompt) for call in calls} == {150}
    lonely = SharedPrefix(client_count=1, rate=1.0, groups=1, system=30, prefix=Lengths(100), alone=1.0)
    calls = [call for _, call in played(lonely.clients(1)[0], 20)]
    assert {shared(calls[0], other) for other in calls[1:]} == {30}


@pytest.mark.parametrize("own", [False, True])
def test_clients_may_share_groups_or_not(own: bool) -> None:
    """With groups of their own, clients share no prefix."""
    workload = SharedPrefix(client_count=2, rate=1.0, groups=1, prefix=Lengths(100), own=own)
    one, other = (played(client, 1)[0][1] for client in workload.clients(1))
    assert shared(one, other) == (0 if own else 100)


def test_popular_groups_are_asked_for_more() -> None:
    """With an exponent, the calls of groups follow Zipf's law."""
    workload = SharedPrefix(client_count=1, rate=1.0, groups=5, popularity=1.1, prefix=Lengths(100))
    counts = Counter(call.prompt.tokens[:100] for _, call in played(workload.clients(1)[0], 4000))
    most = [count for _, count in counts.most_common()]
    assert most[0] / most[3] == pytest.approx(4**1.1, rel=0.2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: TreeOfThoughts(rate=1.0, branches=0),
        lambda: TreeOfThoughts(rate=1.0, question_times=0),
        lambda: Judge(rate=1.0, dimensions=0),
        lambda: SharedPrefix(rate=1.0, groups=0),
        lambda: SharedPrefix(rate=1.0, alone=2.0),
        TreeOfThoughts,
    ],
)
def test_parameters_that_make_no_traffic_are_refused(make: object) -> None:
    """Each family checks its own parameters and those that all families have."""
    assert callable(make)
    with pytest.raises(ValueError, match="workload"):
        make()
