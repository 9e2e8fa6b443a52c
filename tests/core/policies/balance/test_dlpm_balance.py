"""DLPM says which requests may go, and balance which of them goes, and where."""

from router.core.fleet.window import FixedWindow
from router.core.policies.balance.balance_parameters import DlpmBalanceParameters
from router.core.scheduler_settings import SchedulerSettings
from tests.core.scenario import CHUNK_TOKENS, Scene

ONE_PLACE = SchedulerSettings(window=FixedWindow(1, 10**6), match_minimum=CHUNK_TOKENS)
TWO_PLACES = SchedulerSettings(window=FixedWindow(2, 10**6))


def group(parameters: DlpmBalanceParameters, settings: SchedulerSettings = TWO_PLACES) -> Scene:
    """Return two ranks that step together."""
    scene = Scene("dlpm_balance", parameters, workers=(), settings=settings)
    for worker in ("w1", "w2"):
        scene.join(worker, barrier="group")
    return scene


def test_of_those_that_may_go_the_one_that_fits_goes() -> None:
    """Of one client's requests the one that fills the lightest rank best goes first."""
    scene = group(DlpmBalanceParameters())
    running = [scene.arrive("ada", letter * size) for letter, size in zip("abcd", (20, 4, 4, 20), strict=True)]
    assert [scene.worker_of(request) for request in running] == ["w1", "w2", "w2", "w1"]
    waiting = [scene.arrive("ada", letter * size) for letter, size in zip("xyz", (60, 30, 2), strict=True)]
    scene.serve(running[1])
    assert scene.order[4:] == [waiting[1]]
    assert scene.worker_of(waiting[1]) == "w2"


def test_what_a_rank_does_not_admit_leaves_its_turn_to_the_next_best() -> None:
    """A request that fills the lightest rank best waits while its prompt is too long for the rank's window."""
    scene = group(DlpmBalanceParameters(), SchedulerSettings(window=FixedWindow(2, 25 * CHUNK_TOKENS)))
    running = []
    for letter, size in zip("abcd", (20, 4, 4, 20), strict=True):
        running.append(scene.arrive("ada", letter * size))
        if letter != "c":
            scene.start(running[-1])
    assert [scene.worker_of(request) for request in running] == ["w1", "w2", "w2", "w1"]
    too_long, worse = scene.arrive("ada", "x" * 30), scene.arrive("ada", "y" * 2)
    scene.serve(running[1])
    assert scene.order[4:] == [worse]
    assert too_long not in scene.order


def test_a_client_in_debt_waits_however_well_its_request_fits() -> None:
    """Only requests that DLPM lets go are compared."""
    scene = group(DlpmBalanceParameters(quantum=1000, overdue_after=0, head_start=0, sparse_first=False))
    running = [scene.arrive("ada", letter * size) for letter, size in zip("abcd", (20, 4, 4, 20), strict=True)]
    assert (scene.deficit("ada").order or 0) < 0
    fits, other = scene.arrive("ada", "x" * 30), scene.arrive("bob", "y" * 60)
    scene.serve(running[1])
    assert scene.order[4:] == [other]
    assert fits not in scene.order


def test_only_the_oldest_are_compared() -> None:
    """A request that arrived after `candidates` others does not go before them."""
    scene = group(DlpmBalanceParameters(candidates=2))
    running = [scene.arrive("ada", letter * size) for letter, size in zip("abcd", (20, 4, 4, 20), strict=True)]
    _, second, _ = [scene.arrive("ada", letter * size) for letter, size in zip("xyz", (60, 50, 30), strict=True)]
    scene.serve(running[1])
    assert scene.order[4:] == [second]


def test_a_request_that_was_passed_over_goes_next() -> None:
    """After `patience` later requests went ahead, the oldest goes to the lightest rank, whatever it loses there."""
    scene = group(DlpmBalanceParameters(patience=3))
    running = [scene.arrive("ada", letter * size) for letter, size in zip("abcd", (20, 4, 4, 20), strict=True)]
    oldest = scene.arrive("ada", "x" * 200)
    later = [scene.arrive("ada", letter * 2) for letter in "efghij"]
    scene.serve(running[1])
    scene.serve(running[2])
    scene.serve(later[0])
    assert scene.order[4:] == later[:3]
    scene.serve(later[1])
    assert scene.order[-1] == oldest
    assert scene.worker_of(oldest) == "w2"


def test_a_prefix_keeps_a_request_at_home_for_a_while() -> None:
    """A rank that would lose much of a cached prefix is no choice before the request has left home."""
    scene = group(DlpmBalanceParameters(home_loss=CHUNK_TOKENS), ONE_PLACE)
    first = scene.arrive("ada", "document" * 4 + "?")
    scene.serve(first)
    other, blocker = scene.arrive("bob", "x"), scene.arrive("bob", "y")
    assert [scene.worker_of(request) for request in (first, other, blocker)] == ["w1", "w2", "w1"]
    again = scene.arrive("ada", "document" * 4 + "!")
    scene.serve(other)
    assert again not in scene.order
    scene.wait(60.0)
    assert scene.worker_of(again) == "w2"


def test_the_queues_follow_when_ranks_begin_or_cease_to_step_together() -> None:
    """Requests that wait while a group forms are balanced from then on, and served by their matches again after it."""
    scene = Scene("dlpm_balance", workers=["w1"], settings=TWO_PLACES)
    running = [scene.arrive("ada", letter * 20) for letter in "ab"]
    longer, fits = scene.arrive("ada", "x" * 60), scene.arrive("ada", "y" * 30)
    scene.join("w1", barrier="group")
    scene.join("w2", barrier="group")
    assert scene.order[2:] == [fits, longer]
    scene.join("w1")
    scene.join("w2")
    held = scene.arrive("ada", "a" * 20)
    scene.arrive("ada", "z" * 9)
    scene.serve(running[1])
    assert scene.order[4:] == [held]


def test_deficits_at_workers_are_kept_only_where_they_decide() -> None:
    """Among ranks in step nothing is copied, so a client has a deficit at a worker only after they step alone."""
    scene = group(DlpmBalanceParameters())
    scene.arrive("ada", "a")
    assert scene.deficit("ada").placement is None
    scene.join("w1")
    scene.join("w2")
    scene.arrive("ada", "b")
    assert scene.deficit("ada").placement is not None
