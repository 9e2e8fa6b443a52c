"""Random histories of sessions: what holds of the gate after any of them."""

from dataclasses import dataclass, replace
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.fleet.window import FixedWindow
from router.core.model.commands import Command
from router.core.model.events import Event, Fault, Returned, Ticked
from router.core.model.request import ClientId, RequestId
from router.core.policies.sessions.session_parameters import SessionParameters
from tests.core.policies.sessions.scenes import ROOM, SMALL, GatedScene

POLICIES: Final = ("dlpm_home", "d2lpm+dlpm", "cache_aware+fcfs")
TIGHT: Final = replace(ROOM, window=FixedWindow(requests=2, unstarted_tokens=200))
CLIENTS: Final = ("ada", "bob", "cyd")
WORKERS: Final = ("w1", "w2")


@dataclass(frozen=True)
class Step:
    """One thing that happens; what it happens to is chosen by `pick` among what there is."""

    what: str
    pick: int = 0
    size: int = 1


CALLS: Final = ("call", "call", "call", "continue", "continue")
ENDS: Final = ("answer", "answer", "answer", "start", "progress", "cancel", "fail", "return")
steps = st.builds(
    Step,
    st.sampled_from((*CALLS, *ENDS, "leave", "join", "wait", "lose")),
    st.integers(0, 11),
    st.integers(1, 6),
)


class History:
    """A fleet to which steps happen, and its commands."""

    def __init__(self, policy: str, kv_chunks: int | None, parameters: SessionParameters | None) -> None:
        self.scene = GatedScene(
            kv_chunks=kv_chunks, workers=WORKERS, policy=policy, parameters=parameters, settings=TIGHT
        )
        self.commands: list[list[Command]] = []
        self._present = [*WORKERS]
        self._prompts: dict[tuple[str, int], str] = {}
        self._output: dict[RequestId, int] = {}
        feed = self.scene.feed

        def recorded(event: Event) -> list[Command]:
            commands = feed(event)
            self.commands.append(commands)
            return commands

        self.scene.feed = recorded  # type: ignore[method-assign]

    @property
    def live(self) -> list[RequestId]:
        scheduler = self.scene.scheduler
        return [name for name in self.scene.requests if name in scheduler._requests]

    @property
    def running(self) -> list[RequestId]:
        return [*self.scene.scheduler.attempts]

    def happen(self, step: Step) -> None:
        running, live = self.running, self.live
        if step.what in ("call", "continue"):
            self._call(step)
        elif step.what == "cancel" and live:
            self.scene.cancel(live[step.pick % len(live)])
        elif step.what in ("leave", "join", "wait", "lose"):
            self._change_fleet(step)
        elif running:
            self._go_on(step, running[step.pick % len(running)])

    def _go_on(self, step: Step, request: RequestId) -> None:
        """Let something happen to a request that a worker has."""
        scene = self.scene
        match step.what:
            case "answer":
                output = max(self._output.get(request, 0), 10 * step.size)
                scene.answer(request, "", output=output, ended_turn=step.size == 1)
            case "start":
                scene.start(request)
            case "progress":
                self._output[request] = self._output.get(request, 0) + 20 * step.size
                scene.progress(request, self._output[request])
            case "fail":
                scene.fail(request)
            case _:
                scene.feed(Returned(request, accepted=step.size > 3, fault=Fault.BROKEN))

    def _change_fleet(self, step: Step) -> None:
        scene = self.scene
        match step.what:
            case "leave" if len(self._present) > 1:
                scene.leave(self._present.pop(step.pick % len(self._present)))
            case "join":
                for worker in [worker for worker in WORKERS if worker not in self._present]:
                    self._present.append(worker)
                    scene.come(worker)
            case "wait":
                scene.wait(step.size * 3.0)
            case "lose":
                scene.evict(self._present[step.pick % len(self._present)])

    def _call(self, step: Step) -> None:
        client, number = CLIENTS[step.pick % 3], step.pick % 4
        key = client, number
        grown = self._prompts.get(key, "") if step.what == "continue" else ""
        prompt = grown + "abcd"[number] * step.size
        self._prompts[key] = prompt[:12]
        self.scene.call(client, self._prompts[key], f"s{number}" if number else None, weight=1.0 + (client == "bob"))

    def drain(self) -> None:
        """Let every call end, and every session become cold."""
        self.happen(Step("join"))
        while self.live:
            for request in self.running:
                self.scene.answer(request, output=self._output.get(request, 0))
            for request in self.live[:1]:
                if request not in self.running:
                    self.scene.wait(50.0)
                    if request in self.live and not self.running:
                        self.scene.cancel(request)
        self.scene.wait(1000.0)
        self.scene.feed(Ticked())


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=30, deadline=None)
@given(happened=st.lists(steps, max_size=60))
def test_reservations_are_those_of_the_admitted_sessions(policy: str, happened: list[Step]) -> None:
    """After any history, what is reserved at each worker is the sum over its sessions, and every other count of the
    gate agrees with them; a drained fleet has nothing reserved, nothing waiting, and no client backlogged.
    """
    history = History(policy, 12, replace(SMALL, growth=16, grace=40, limit=6))
    for step in happened:
        history.happen(step)
        history.scene.gate.check_integrity()
    history.drain()
    short = history.scene.call("dan", "z")
    history.scene.cancel(short)
    assert not history.scene.reserved
    assert not history.scene.gate.paused
    assert not any(map(history.scene.scheduler.backlog.of_client, map(ClientId, CLIENTS)))


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=15, deadline=None)
@given(happened=st.lists(steps, max_size=50), kv_chunks=st.sampled_from([None, 10_000]))
def test_an_open_gate_changes_no_command(policy: str, happened: list[Step], kv_chunks: int | None) -> None:
    """Where the KV capacity is not known, or far above all contexts, the commands are those of the policy alone."""
    gate, alone = History(policy, kv_chunks, SMALL), History(policy, kv_chunks, None)
    for step in happened:
        gate.happen(step)
        alone.happen(step)
    assert gate.commands == alone.commands


@settings(max_examples=15, deadline=None)
@given(happened=st.lists(steps, max_size=50))
def test_equal_histories_have_equal_commands(happened: list[Step]) -> None:
    """The same events at the same times give the same commands, so that a recorded run can be replayed."""
    one, two = History("dlpm_home", 12, SMALL), History("dlpm_home", 12, SMALL)
    for step in happened:
        one.happen(step)
        two.happen(step)
    assert one.commands == two.commands
